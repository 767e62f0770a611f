// Differences of a tile's values from their base, as natural numbers, and the c that fits them.
#pragma once

#include "codec/cuda/lossless_planes.cuh"

namespace zcomm::gpu {

// Half a block: the exponents of its base, and the differences as natural numbers z, at most 255.
struct HalfDifferences {
  // Takes kHalfWords words each.
  ZCOMM_DEVICE HalfDifferences(const std::uint32_t* base, const std::uint32_t* values, DType dtype) {
    const HalfPlanes before(base), after(values);
    exponents = before.exponents(dtype);
    if (dtype == DType::byte_pairs) {
      set_pairs(zigzag(before.low, after.low), zigzag(before.high, after.high));
    } else {
      set_floats(before, after);
    }
  }

  ZCOMM_DEVICE std::uint32_t sum_of_exponents() const {
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) sum += popcount(exponents.planes[i]) << i;
    return sum;
  }

  Bytes exponents, z;

 private:
  ZCOMM_DEVICE void set_floats(const HalfPlanes& before, const HalfPlanes& after) {
    std::uint32_t planes[16], borrow = 0, is_large = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint32_t a = after.plane(i), b = before.plane(i);
      planes[i] = a ^ b ^ borrow;
      borrow = next_borrow(a, b, borrow);
    }
    const std::uint32_t sign = planes[15];
#pragma unroll
    for (std::uint32_t i = 7; i < 15; ++i) is_large |= planes[i] ^ sign;
    z.planes[0] = sign | is_large;
#pragma unroll
    for (std::uint32_t i = 1; i < 8; ++i) z.planes[i] = (planes[i - 1] ^ sign) | is_large;
  }

  // Returns the differences of bytes as natural numbers.
  ZCOMM_DEVICE static Bytes zigzag(const Bytes& before, const Bytes& after) {
    std::uint32_t planes[8], borrow = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      planes[i] = after.planes[i] ^ before.planes[i] ^ borrow;
      borrow = next_borrow(after.planes[i], before.planes[i], borrow);
    }
    Bytes numbers;
    numbers.planes[0] = planes[7];
#pragma unroll
    for (std::uint32_t i = 1; i < 8; ++i) numbers.planes[i] = planes[i - 1] ^ planes[7];
    return numbers;
  }

  // Takes those of both bytes. A pair of which one has changed has twice its number, less 1 for the low byte.
  ZCOMM_DEVICE void set_pairs(const Bytes& low, const Bytes& high) {
    std::uint32_t in_low = 0, in_high = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) in_low |= low.planes[i], in_high |= high.planes[i];
    std::uint32_t borrow = in_low, halves[8];
#pragma unroll
    for (std::uint32_t i = 0; i < 8; ++i) {
      const std::uint32_t one = low.planes[i] | high.planes[i];
      halves[i] = one ^ borrow;
      borrow &= ~one;
    }
    const std::uint32_t is_escape = (in_low & in_high) | halves[7];
    z.planes[0] = in_low | is_escape;
#pragma unroll
    for (std::uint32_t i = 1; i < 8; ++i) z.planes[i] = halves[i - 1] | is_escape;
  }
};

inline constexpr std::uint32_t kWeighedPlanes = 15;

// Computes twice ceil(z / 2) times the weight of z, which is 64 >> clamp(e - exponent, 0, 7), but 0 at 7. A z of a pair
// counts as 7 at most.
ZCOMM_DEVICE void weigh(const HalfDifferences& half, std::uint32_t e, bool is_pair,
                        std::uint32_t (&weighed)[kWeighedPlanes]) {
  Bytes z = half.z;
  if (is_pair) {
#pragma unroll
    for (std::uint32_t i = 3; i < 8; ++i) {
      z.planes[0] |= z.planes[i], z.planes[1] |= z.planes[i], z.planes[2] |= z.planes[i];
      z.planes[i] = 0;
    }
  }
  Widths widths(e, half.exponents);
  const std::uint32_t is_weighed = ~widths.is_above(6);
  std::uint32_t carry = z.planes[0];
#pragma unroll
  for (std::uint32_t i = 0; i < kWeighedPlanes; ++i) {
    const std::uint32_t next = i < 7 ? z.planes[i + 1] : 0;
    weighed[i] = i < 8 ? (next ^ carry) & is_weighed : 0;
    carry &= next;
  }
#pragma unroll
  for (std::uint32_t& plane : widths.planes) plane = ~plane;
  shift_up(weighed, widths.planes);
}

ZCOMM_DEVICE std::uint32_t sum_of_weighed(const HalfDifferences& half, std::uint32_t e, bool is_pair) {
  std::uint32_t weighed[kWeighedPlanes], sum = 0;
  weigh(half, e, is_pair, weighed);
#pragma unroll
  for (std::uint32_t i = 0; i < kWeighedPlanes; ++i) sum += popcount(weighed[i]) << i;
  return sum / 2;
}
// Chooses c: roughly the exponent above which updates fall below the last place, from the tile's mean update in 2^e.
ZCOMM_DEVICE std::uint32_t choose_c(const HalfDifferences& low, const HalfDifferences& high, std::uint32_t count,
                                    DType dtype) {
  const bool is_pair = dtype == DType::byte_pairs;
  const std::uint32_t of_padding = is_pair ? kPairExponent : dtype == DType::bfloat16 ? kPadding >> 7 : kPadding >> 10;
  const std::uint32_t padding = (kTileValues - count) * of_padding;
  const std::uint32_t exponents = low.sum_of_exponents() + high.sum_of_exponents();
  const std::uint32_t e = (sum_of_lanes(exponents) - padding) / count + 2;
  const std::uint32_t sum = sum_of_lanes(sum_of_weighed(low, e, is_pair) + sum_of_weighed(high, e, is_pair));
  const std::uint64_t mean = kTileValues * static_cast<std::uint64_t>(1 + sum) / count;
  const std::int32_t c = static_cast<std::int32_t>(e) + 63 - __clzll(static_cast<long long>(mean)) - 15;
  return c < 0 ? 0 : smaller_of(static_cast<std::uint32_t>(c), 255);
}

}  // namespace zcomm::gpu
