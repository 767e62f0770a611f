// Randomized Walsh-Hadamard transform of blocks: see rotate() in bench/zcomm_bench/reference.py.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kRotated = 32;        // the least elements that are rotated together
inline constexpr std::uint32_t kLarge = 246u << 23;  // 2^119: 512 values of this magnitude may overflow when added

// Groups of 16 values per thread: both halves of a group of 32, or one half, with the other in the neighbor.
template <std::uint32_t kGroups>
using Halves32 = float[kGroups][kGroup];

template <std::uint32_t kGroups>
ZCOMM_DEVICE void multiply(Halves32<kGroups>& values, float factor) {
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) values[g][i] = __fmul_rn(values[g][i], factor);
  }
}

template <std::uint32_t kGroups>
ZCOMM_DEVICE std::uint32_t largest_magnitude(const Halves32<kGroups>& values) {
  std::uint32_t largest = 0;
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = larger_of(largest, __float_as_uint(values[g][i]) & kAbs32);
  }
  return largest;
}

// Returns how many elements are rotated together with element `begin`: `rotation` in a whole block, else 32 in a whole
// group of 32, else 0.
ZCOMM_DEVICE std::uint32_t rotated_together(std::uint32_t begin, std::uint32_t num_elements, std::uint32_t rotation) {
  if ((begin | (rotation - 1)) < num_elements) return rotation;
  return (begin | (kRotated - 1)) < num_elements ? kRotated : 0;
}

// Flips signs by the position in a block of `size` elements: see Signs in codec/cpu/rotate.inl.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void flip_signs(Halves32<kGroups>& values, std::uint32_t begin, std::uint32_t size) {
  std::uint32_t bits = (begin & (size - 1)) / kRotated + 1;
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
  bits = (bits ^ (bits >> 16)) >> (begin % kRotated);
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) {
    float& value = values[i / kGroup][i % kGroup];
    value = __uint_as_float(__float_as_uint(value) ^ (bits << (31 - i) & 0x80000000u));
  }
}

// Transforms blocks in steps between elements 1, 2, 4 ... apart. All threads of a warp call this
// with the same `rotation`. Threads of a block have the same `size`, at most `rotation`.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void hadamard(Halves32<kGroups>& values, std::uint32_t size, std::uint32_t rotation) {
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i & step) continue;
        const float first = values[g][i], second = values[g][i + step];
        values[g][i] = __fadd_rn(first, second);
        values[g][i + step] = __fadd_rn(first, -second);
      }
    }
  }
  if constexpr (kGroups == 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float first = values[0][i], second = values[1][i];
      values[0][i] = __fadd_rn(first, second);
      values[1][i] = __fadd_rn(first, -second);
    }
  }
#pragma unroll 1
  for (std::uint32_t distance = 1; distance * (kGroups * kGroup) < rotation; distance *= 2) {
    const float sign = (threadIdx.x & distance) == 0 ? 1.0f : -1.0f;
    const bool is_inside = distance * (kGroups * kGroup) < size;
#pragma unroll
    for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) {
      float& value = values[i / kGroup][i % kGroup];
      const float other = __shfl_xor_sync(0xffffffffu, value, static_cast<int>(distance));
      if (is_inside) value = __fmaf_rn(value, sign, other);  // exact product
    }
  }
}

// Rotates values from element `begin` on. Called by all threads of a warp, with the same `rotation`.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void rotate(Halves32<kGroups>& values, std::uint32_t begin, std::uint32_t num_elements,
                         std::uint32_t rotation) {
  const std::uint32_t size = rotated_together(begin, num_elements, rotation);
  Halves32<kGroups> rotated;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) rotated[i / kGroup][i % kGroup] = values[i / kGroup][i % kGroup];
  const std::uint32_t whole = larger_of(size, kRotated);
  multiply<kGroups>(rotated, __uint_as_float((254u << 23) - __float_as_uint(static_cast<float>(whole))));  // 1 / whole
  flip_signs<kGroups>(rotated, begin, whole);
  hadamard<kGroups>(rotated, size, rotation);
  if (size == 0) return;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) values[i / kGroup][i % kGroup] = rotated[i / kGroup][i % kGroup];
}

// Rotates terms back, as rotate() is called.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void rotate_back(Halves32<kGroups>& terms, std::uint32_t begin, std::uint32_t num_elements,
                              std::uint32_t rotation) {
  const std::uint32_t size = rotated_together(begin, num_elements, rotation);
  std::uint32_t largest = largest_magnitude<kGroups>(terms);
#pragma unroll 1
  for (std::uint32_t distance = 1; distance * (kGroups * kGroup) < rotation; distance *= 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, largest, static_cast<int>(distance));
    if (distance * (kGroups * kGroup) < size) largest = larger_of(largest, other);
  }
  const bool is_large = !(largest < kLarge);
  Halves32<kGroups> rotated;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) rotated[i / kGroup][i % kGroup] = terms[i / kGroup][i % kGroup];
  if (is_large) multiply<kGroups>(rotated, 0x1p-9f);
  hadamard<kGroups>(rotated, size, rotation);
  if (size == 0) return;
  flip_signs<kGroups>(rotated, begin, size);
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) {
    const float value = __fmaf_rn(rotated[i / kGroup][i % kGroup], is_large ? 0x1p9f : 1.0f, 0.0f);  // no -0
    const bool is_finite = (__float_as_uint(rotated[i / kGroup][i % kGroup]) & kAbs32) < kInfinity32;
    const bool overflows = is_finite && (__float_as_uint(value) & kAbs32) == kInfinity32;
    // The largest finite value.
    terms[i / kGroup][i % kGroup] = overflows ? __uint_as_float(__float_as_uint(value) - 1) : value;
  }
}

}  // namespace zcomm::gpu
