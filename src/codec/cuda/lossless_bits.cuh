// Bit streams that the lanes of a warp write and read together, from the lowest bit of the first word on.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

ZCOMM_DEVICE std::uint32_t lane_index() { return threadIdx.x % 32; }

// Returns the sum over all lanes. Called by all lanes.
template <class Number>
ZCOMM_DEVICE Number sum_of_lanes(Number number) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) number += __shfl_xor_sync(kAllLanes, number, distance);
  return number;
}

// Returns the sum over the lanes before this one; `total` becomes that over all lanes. Called by all lanes.
ZCOMM_DEVICE std::uint32_t sum_of_lanes_before(std::uint32_t number, std::uint32_t& total) {
  std::uint32_t before = 0;
  total = number;
#pragma unroll
  for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t others = __shfl_xor_sync(kAllLanes, total, static_cast<int>(distance));
    if ((lane_index() & distance) != 0) before += others;
    total += others;
  }
  return before;
}

ZCOMM_DEVICE std::uint32_t low_half(std::uint64_t bits) { return static_cast<std::uint32_t>(bits); }
ZCOMM_DEVICE std::uint32_t high_half(std::uint64_t bits) { return static_cast<std::uint32_t>(bits >> 32); }
ZCOMM_DEVICE std::uint64_t both_halves(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint64_t>(high) << 32 | low;
}
ZCOMM_DEVICE std::uint32_t popcount(std::uint32_t bits) { return static_cast<std::uint32_t>(__popc(bits)); }
ZCOMM_DEVICE std::uint32_t popcount(std::uint64_t bits) { return popcount(low_half(bits)) + popcount(high_half(bits)); }
ZCOMM_DEVICE std::uint32_t lowest_bit(std::uint32_t bits) {
  return static_cast<std::uint32_t>(__ffs(static_cast<int>(bits))) - 1;
}
ZCOMM_DEVICE std::uint32_t lowest_bit(std::uint64_t bits) {
  return static_cast<std::uint32_t>(__ffsll(static_cast<long long>(bits))) - 1;
}

// Moves that pack the bits named by a mask of 32 from bit 0 on: bits shift within each byte by 1, 2 and 4 places
// (Warren, Hacker's Delight, 2nd ed., 7-4), as many as there are zeros below; then the bytes shift. The number of
// instructions does not depend on the mask, so no lane waits for the one with most bits.
class BitPlaces {
 public:
  ZCOMM_DEVICE explicit BitPlaces(std::uint32_t mask) : mask_(mask) {
    std::uint32_t zeros = ~mask << 1 & 0xfefefefeu, rest = mask;
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) {
      std::uint32_t odd = zeros ^ (zeros << 1 & 0xfefefefeu);  // set if the number of `zeros` at or below is odd
      odd ^= odd << 2 & 0xfcfcfcfcu;
      odd ^= odd << 4 & 0xf0f0f0f0u;
      moves_[i] = odd & rest;
      rest = (rest ^ moves_[i]) | moves_[i] >> (1 << i);
      zeros &= ~odd;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) {
      zeros_below_[i] = popcount(~mask & ((256u << (8 * i)) - 1));
    }
  }

  ZCOMM_DEVICE std::uint32_t gather(std::uint32_t bits) const {
    bits &= mask_;
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) bits = (bits & ~moves_[i]) | (bits & moves_[i]) >> (1 << i);
    return (bits & 0xffu) | (bits & 0xff00u) >> zeros_below_[0] | (bits & 0xff0000u) >> zeros_below_[1] |
           (bits & 0xff000000u) >> zeros_below_[2];
  }
  // Inverts gather; ignores further bits.
  ZCOMM_DEVICE std::uint32_t scatter(std::uint32_t bits) const {
    bits = (bits & 0xffu) | (bits << zeros_below_[0] & 0xff00u) | (bits << zeros_below_[1] & 0xff0000u) |
           (bits << zeros_below_[2] & 0xff000000u);
#pragma unroll
    for (std::uint32_t i = 3; i-- > 0;) bits = (bits & ~moves_[i]) | (bits << (1 << i) & moves_[i]);
    return bits & mask_;
  }

 private:
  std::uint32_t mask_, moves_[3], zeros_below_[3];
};

// Does the same with a loop over the ones of a mask: faster for masks with few ones.
struct FewBitPlaces {
  ZCOMM_DEVICE explicit FewBitPlaces(std::uint32_t ones) : mask(ones) {}

  ZCOMM_DEVICE std::uint32_t gather(std::uint32_t bits) const {
    std::uint32_t gathered = 0;
#pragma unroll 1
    for (std::uint32_t rest = mask, place = 1; rest != 0; rest &= rest - 1, place <<= 1) {
      if ((bits & rest & (0 - rest)) != 0) gathered |= place;
    }
    return gathered;
  }
  ZCOMM_DEVICE std::uint32_t scatter(std::uint32_t bits) const {
    std::uint32_t scattered = 0;
#pragma unroll 1
    for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1, bits >>= 1) {
      scattered |= rest & (0 - rest) & (0 - (bits & 1u));
    }
    return scattered;
  }

  std::uint32_t mask;
};

// Extracts the bits of `bits` where `mask` has ones, packed from bit 0 on.
template <class Places>
ZCOMM_DEVICE std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) {
  const std::uint64_t high = Places(high_half(mask)).gather(high_half(bits));
  return Places(low_half(mask)).gather(low_half(bits)) | high << popcount(low_half(mask));
}
// Inverts gather_bits; ignores further bits.
template <class Places>
ZCOMM_DEVICE std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) {
  const std::uint32_t above = low_half(bits >> popcount(low_half(mask)));
  return both_halves(Places(low_half(mask)).scatter(low_half(bits)), Places(high_half(mask)).scatter(above));
}

// Extracts the bytes of `bits` that `flags` names, packed from byte 0 on.
ZCOMM_DEVICE std::uint64_t gather_bytes(std::uint64_t bits, std::uint32_t flags) {
  std::uint64_t gathered = 0;
#pragma unroll 1
  for (std::uint32_t place = 0; flags != 0; flags &= flags - 1, place += 8) {
    gathered |= (bits >> (8 * lowest_bit(flags)) & 0xffu) << place;
  }
  return gathered;
}
// Inverts gather_bytes; ignores further bytes.
ZCOMM_DEVICE std::uint64_t scatter_bytes(std::uint64_t bits, std::uint32_t flags) {
  std::uint64_t scattered = 0;
#pragma unroll 1
  for (; flags != 0; flags &= flags - 1, bits >>= 8) scattered |= (bits & 0xffu) << (8 * lowest_bit(flags));
  return scattered;
}
// Sets a flag for each byte of four that is not 0.
ZCOMM_DEVICE std::uint32_t byte_flags(std::uint32_t bytes) {
  bytes |= bytes >> 4;
  bytes |= bytes >> 2;
  bytes |= bytes >> 1;
  return (bytes & 0x01010101u) * 0x01020408u >> 24 & 0xfu;
}

// Puts bits into words that are zero there, from bit `position` on. Other lanes may write to the same words.
ZCOMM_DEVICE void put_bits(std::uint64_t bits, std::uint32_t position, std::uint32_t* words) {
  const std::uint32_t low = low_half(bits), high = high_half(bits), shift = position % 32;
  const std::uint32_t parts[3] = {low << shift, __funnelshift_l(low, high, shift), __funnelshift_l(high, 0, shift)};
#pragma unroll
  for (std::uint32_t i = 0; i < 3; ++i) {
    if (parts[i] != 0) atomicOr(words + position / 32 + i, parts[i]);
  }
}

// Returns the 64 bits from `position` on; reads three words.
ZCOMM_DEVICE std::uint64_t take_bits(const std::uint32_t* words, std::uint32_t position) {
  const std::uint32_t* first = words + position / 32;
  const std::uint32_t shift = position % 32;
  return both_halves(__funnelshift_r(first[0], first[1], shift), __funnelshift_r(first[1], first[2], shift));
}

}  // namespace zcomm::gpu
