// Codes of EDEN: see codec/cpu/eden.inl, which gives the same bits.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/rotate.cuh"

namespace zcomm::gpu {

using CodeWords = std::uint32_t[4];  // of a group; kinds of fewer bits use fewer words, zeros follow

ZCOMM_DEVICE bool is_eden(ElementKind kind) { return kind >= ElementKind::eden2; }

// What codes stand for, one per byte: kEden2, kEden3 and kEden4 of codec/cpu/codes.inl.
struct EdenLevels {
  std::uint32_t low, high;

  constexpr ZCOMM_DEVICE std::uint32_t at(std::uint32_t level) const {
    return (level < 4 ? low >> (8 * level) : high >> (8 * (level - 4))) & 0xffu;
  }
  ZCOMM_DEVICE std::uint32_t operator[](std::uint32_t level) const { return __byte_perm(low, high, level) & 0xffu; }
};

constexpr ZCOMM_DEVICE EdenLevels eden_levels(std::uint32_t bits) {
  return bits == 2   ? EdenLevels{0x4515u, 0}
         : bits == 3 ? EdenLevels{0x633e230bu, 0}
                     : EdenLevels{0x2b1e1206u, 0x7e5f4a3au};
}

// Unpacks a group's codes to what they stand for.
ZCOMM_DEVICE void unpack_eden(std::uint32_t bits, CodeWords& words, float (&codes)[kGroup]) {
  const std::uint32_t mask = (1u << bits) - 1, sign = 1u << (bits - 1);
  const EdenLevels levels = eden_levels(bits);
#pragma unroll
  for (std::uint32_t i = 0; i < kGroup; ++i) {
    const std::uint32_t pattern = words[0] & mask;
#pragma unroll
    for (int k = 0; k < 3; ++k) words[k] = __funnelshift_r(words[k], words[k + 1], bits);
    words[3] >>= bits;
    const float level = __fadd_rn(__uint_as_float(0x4b000000u | levels[pattern & (sign - 1)]), -0x1p23f);
    codes[i] = (pattern & sign) == 0 ? level : -level;
  }
}

// Codes of a thread's groups, and the float32 bits of the scale of their block.
template <std::uint32_t kGroups>
struct EdenCodes {
  ZCOMM_DEVICE bool are_zeros() const { return scale == 0 || scale == kNan32; }

  std::uint32_t of[kGroups][kGroup];
  std::uint32_t scale;
};

// Returns the sum over the threads of a block, a power of two of them. Called by all threads of a warp.
ZCOMM_DEVICE std::uint32_t sum_of_block(std::uint32_t term, std::uint32_t log2_lanes) {
#pragma unroll 1
  for (std::uint32_t distance = 1; distance < 1u << log2_lanes; distance *= 2) {
    term += __shfl_xor_sync(0xffffffffu, term, static_cast<int>(distance));
  }
  return term;
}

// Returns a block's scale from its sums: squares of values, values times levels, squares of levels.
ZCOMM_DEVICE std::uint32_t eden_scale(float power, std::uint32_t products, std::uint32_t squares, float unit) {
  const float unbiased = __fdiv_rn(power, static_cast<float>(products));
  const float most = __fmul_rn(1.25f, __fdiv_rn(static_cast<float>(products), static_cast<float>(squares)));
  const float scale = __fmul_rn(unbiased < most ? unbiased : most, unit);
  const std::uint32_t bits = __float_as_uint(scale);
  return scale < 0x1p-126f ? 0 : (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

// Chooses the codes of rotated values from element `begin` of the piece on. Called by all threads of a warp.
template <std::uint32_t kBits, std::uint32_t kGroups>
ZCOMM_DEVICE EdenCodes<kGroups> eden_codes(const Halves32<kGroups>& values, std::uint32_t largest, std::uint32_t begin,
                                           const BlocksOut& out) {
  constexpr std::uint32_t kLevels = 1u << (kBits - 1);
  constexpr EdenLevels levels = eden_levels(kBits);
  const std::uint32_t exponent = larger_of(largest >> 23, 10u);
  const float up = __uint_as_float((263u - exponent) << 23);
  EdenCodes<kGroups> codes;
  std::uint32_t power = 0, products = 0, squares = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) {
    const float magnitude = __uint_as_float(__float_as_uint(values[i / kGroup][i % kGroup]) & kAbs32);
    const std::uint32_t rounded = __float_as_uint(__fadd_rn(__fmul_rn(magnitude, up), 0x1.8p23f)) & 0xffffu;
    codes.of[i / kGroup][i % kGroup] = rounded;
    power += rounded * rounded;
  }
  const float sum = static_cast<float>(sum_of_block(power, out.log2_lanes));
  const std::uint32_t first = begin & ~(out.block_size - 1u);  // a power of two
  const std::uint32_t count = first < out.num_elements ? smaller_of(out.num_elements - first, out.block_size) : 1u;
  const float rms = __fsqrt_rn(__fdiv_rn(sum, static_cast<float>(count)));
  std::uint32_t from[kLevels];  // the least magnitude of a level
#pragma unroll
  for (std::uint32_t k = 1; k < kLevels; ++k) {
    const float middle = static_cast<float>(levels.at(k - 1) + levels.at(k)) / 92.0f;
    from[k] = __float_as_uint(__fadd_rn(__fmul_rn(rms, middle), 0x1.8p23f)) & 0xffffu;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kGroups * kGroup; ++i) {
    std::uint32_t& code = codes.of[i / kGroup][i % kGroup];
    const std::uint32_t magnitude = code;
    code = 0;
#pragma unroll
    for (std::uint32_t k = 1; k < kLevels; ++k) code += magnitude >= from[k] ? 1u : 0u;
    const std::uint32_t level = begin + i < out.num_elements ? levels[code] : 0u;
    products += magnitude * level;
    squares += level * level;
    code |= __float_as_uint(values[i / kGroup][i % kGroup]) >> 31 << (kBits - 1);
  }
  products = sum_of_block(products, out.log2_lanes);
  squares = sum_of_block(squares, out.log2_lanes);
  codes.scale = kNan32;
  if (largest < kInfinity32) {
    codes.scale = sum == 0.0f ? 0 : eden_scale(sum, products, squares, __uint_as_float((exponent - 9u) << 23));
  }
  return codes;
}

}  // namespace zcomm::gpu
