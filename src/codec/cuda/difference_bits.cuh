// Streams of bits that the lanes of a warp write and read together, from the lowest bit of the first word on.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

ZCOMM_DEVICE std::uint32_t lane_index() { return threadIdx.x % 32; }

// Of all lanes; all come here.
template <class Number>
ZCOMM_DEVICE Number sum_of_lanes(Number number) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) number += __shfl_xor_sync(kAllLanes, number, distance);
  return number;
}

// Of the lanes before this one, and of all; all come here.
struct LaneSums {
  ZCOMM_DEVICE explicit LaneSums(std::uint32_t number) : before(0), total(number) {
#pragma unroll
    for (std::uint32_t distance = 1; distance < 32; distance *= 2) {
      const std::uint32_t others = __shfl_xor_sync(kAllLanes, total, static_cast<int>(distance));
      if ((lane_index() & distance) != 0) before += others;
      total += others;
    }
  }
  std::uint32_t before, total;
};

ZCOMM_DEVICE std::uint32_t low_half(std::uint64_t bits) { return static_cast<std::uint32_t>(bits); }
ZCOMM_DEVICE std::uint32_t high_half(std::uint64_t bits) { return static_cast<std::uint32_t>(bits >> 32); }
ZCOMM_DEVICE std::uint64_t both_halves(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint64_t>(high) << 32 | low;
}
ZCOMM_DEVICE std::uint32_t popcount(std::uint64_t bits) { return static_cast<std::uint32_t>(__popcll(bits)); }
ZCOMM_DEVICE std::uint32_t lowest_bit(std::uint32_t bits) {
  return static_cast<std::uint32_t>(__ffs(static_cast<int>(bits))) - 1;
}
ZCOMM_DEVICE std::uint32_t lowest_bit(std::uint64_t bits) {
  return static_cast<std::uint32_t>(__ffsll(static_cast<long long>(bits))) - 1;
}

// The bits of `bits` where `mask` has ones, side by side from bit 0 on.
ZCOMM_DEVICE std::uint32_t gather_half(std::uint32_t bits, std::uint32_t mask) {
  if (mask == ~0u) return bits;
  std::uint32_t gathered = 0;
#pragma unroll 1
  for (std::uint32_t i = 0; mask != 0; ++i, mask &= mask - 1) gathered |= (bits >> lowest_bit(mask) & 1u) << i;
  return gathered;
}
ZCOMM_DEVICE std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) {
  const std::uint64_t high = gather_half(high_half(bits), high_half(mask));
  return gather_half(low_half(bits), low_half(mask)) | high << popcount(low_half(mask));
}
// The inverse; further bits are not looked at.
ZCOMM_DEVICE std::uint32_t scatter_half(std::uint32_t bits, std::uint32_t mask) {
  if (mask == ~0u) return bits;
  std::uint32_t scattered = 0;
#pragma unroll 1
  for (; mask != 0; mask &= mask - 1, bits >>= 1) scattered |= (bits & 1u) << lowest_bit(mask);
  return scattered;
}
ZCOMM_DEVICE std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) {
  const std::uint32_t low = scatter_half(low_half(bits), low_half(mask));
  return both_halves(low, scatter_half(low_half(bits >> popcount(low_half(mask))), high_half(mask)));
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

// The 64 bits from `position` on: three words are read.
ZCOMM_DEVICE std::uint64_t take_bits(const std::uint32_t* words, std::uint32_t position) {
  const std::uint32_t* first = words + position / 32;
  const std::uint32_t shift = position % 32;
  return both_halves(__funnelshift_r(first[0], first[1], shift), __funnelshift_r(first[1], first[2], shift));
}

}  // namespace zcomm::gpu
