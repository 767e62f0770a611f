// Walsh-Hadamard transform of groups of 32 values: see rotate() in bench/zcomm_bench/reference.py.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

inline constexpr std::uint32_t kRotated = 32;
inline constexpr std::uint32_t kLarge = 250u << 23;  // 2^123: 32 values of this magnitude may overflow when added

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

// Transforms in five steps. With one group per thread, called by all threads of a warp.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void hadamard(Halves32<kGroups>& values) {
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
  const float sign = threadIdx.x % 2 == 0 ? 1.0f : -1.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if constexpr (kGroups == 2) {
      const float first = values[0][i], second = values[1][i];
      values[0][i] = __fadd_rn(first, second);
      values[1][i] = __fadd_rn(first, -second);
    } else {
      values[0][i] = __fmaf_rn(values[0][i], sign, __shfl_xor_sync(0xffffffffu, values[0][i], 1));  // exact product
    }
  }
}

template <std::uint32_t kGroups>
ZCOMM_DEVICE void rotate(Halves32<kGroups>& values) {
  multiply<kGroups>(values, 0x1p-5f);
  hadamard<kGroups>(values);
}

template <std::uint32_t kGroups>
ZCOMM_DEVICE void rotate_back(Halves32<kGroups>& terms) {
  std::uint32_t largest = largest_magnitude<kGroups>(terms);
  if constexpr (kGroups == 1) largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  const bool is_large = !(largest < kLarge);
  if (is_large) multiply<kGroups>(terms, 0x1p-5f);
  hadamard<kGroups>(terms);
  if (!is_large) return;
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const bool is_finite = (__float_as_uint(terms[g][i]) & kAbs32) < kInfinity32;
      const float value = __fmul_rn(terms[g][i], 32.0f);
      const bool overflows = is_finite && (__float_as_uint(value) & kAbs32) == kInfinity32;
      terms[g][i] = overflows ? __uint_as_float(__float_as_uint(value) - 1) : value;  // largest finite value
    }
  }
}

// Rotates, or rotates back, values from element `begin` on if their group of 32 is whole. With one group per thread,
// called by all threads of a warp.
template <std::uint32_t kGroups, class Rotate>
ZCOMM_DEVICE void rotate_if_whole(Halves32<kGroups>& values, std::uint32_t begin, std::uint32_t num_elements,
                                  Rotate rotate) {
  Halves32<kGroups> rotated;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) rotated[i / kGroup][i % kGroup] = values[i / kGroup][i % kGroup];
  rotate(rotated);
  if (begin / kRotated * kRotated + kRotated > num_elements) return;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) values[i / kGroup][i % kGroup] = rotated[i / kGroup][i % kGroup];
}

}  // namespace zcomm::gpu
