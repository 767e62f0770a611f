// Scales and codes.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

// --- Scales. The host codec divides; see make_scales() in codec/cpu/encode.inl.

// Returns x / max_code, rounded to nearest, for finite x >= 0 whose quotient is at least 2^-126; below that, a number
// less than 2^-126. The product with `reciprocal` (1 / max_code) is within one unit of the quotient, and its remainder
// is exact: adding the remainder's part gives the correct rounding (Markstein).
ZCOMM_DEVICE float divide_by_max_code(float x, float max_code, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, max_code, x), reciprocal, quotient);
}

// Returns 1 / scale, rounded to nearest, from an approximation that is at most one unit off. One Newton step leaves a
// relative error of 2^-46; no reciprocal of 8 significant bits is that near to the middle between two floats.
ZCOMM_DEVICE float refine_reciprocal(float scale, float approximation) {
  return __fmaf_rn(approximation, __fmaf_rn(-scale, approximation, 1.0f), approximation);
}

ZCOMM_DEVICE float approximate_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
#else
  return 1.0f / x;
#endif
}

// Returns the float32 bits of the scale of a block of finite values; infinity's beyond the largest bfloat16.
ZCOMM_DEVICE std::uint32_t make_scale(float absmax, float max_code, float reciprocal) {
  const float quotient = divide_by_max_code(absmax, max_code, reciprocal);
  const std::uint32_t rounded_up = (__float_as_uint(quotient) + 0xffffu) & 0xffff0000u;
  constexpr std::uint32_t kMinScale = 0x00800000u;  // 2^-126
  return larger_of(rounded_up, kMinScale);
}

// --- Codes

// Rounds x * reciprocal to nearest even; the low bits of the result are the code.
ZCOMM_DEVICE std::uint32_t quantize(float x, float reciprocal) {
  return __float_as_uint(__fadd_rn(__fmul_rn(x, reciprocal), 0x1.8p23f));
}

// Packs the low bytes of four words.
ZCOMM_DEVICE std::uint32_t pack_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Returns byte i of `bytes`, less than 256, plus 32768: a float without a conversion.
ZCOMM_DEVICE float byte_to_float(std::uint32_t bytes, int i) {
  return __uint_as_float(__byte_perm(bytes, 0x47000000u, 0x7404u | static_cast<std::uint32_t>(i) << 4));
}

struct Int8 {
  static constexpr float kMaxCode = 127.0f;
  static constexpr int kWords = 4;  // of the codes of a group
  static constexpr int kCodesPerByte = 1;
  static constexpr float kBias = 32768.0f + 128.0f;

  static ZCOMM_DEVICE void pack(const std::uint32_t (&codes)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = pack_bytes(codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]);
    }
  }
  // Unpacks codes plus kBias.
  static ZCOMM_DEVICE void unpack(const std::uint32_t* words, float (&biased)[kGroup]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) biased[i] = byte_to_float(words[i / 4] ^ 0x80808080u, i % 4);
  }
};

struct Int4 {
  static constexpr float kMaxCode = 7.0f;
  static constexpr int kWords = 2;
  static constexpr int kCodesPerByte = 2;
  static constexpr float kBias = 32768.0f + 8.0f;

  static ZCOMM_DEVICE void pack(const std::uint32_t (&codes)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t even = pack_bytes(codes[8 * i], codes[8 * i + 2], codes[8 * i + 4], codes[8 * i + 6]);
      const std::uint32_t odd = pack_bytes(codes[8 * i + 1], codes[8 * i + 3], codes[8 * i + 5], codes[8 * i + 7]);
      words[i] = (even & 0x0f0f0f0fu) | ((odd << 4) & 0xf0f0f0f0u);
    }
  }
  static ZCOMM_DEVICE void unpack(const std::uint32_t* words, float (&biased)[kGroup]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t word = words[i / 4] ^ 0x88888888u;
      biased[2 * i] = byte_to_float(word & 0x0f0f0f0fu, i % 4);
      biased[2 * i + 1] = byte_to_float((word >> 4) & 0x0f0f0f0fu, i % 4);
    }
  }
};

// Keeps NaN.
ZCOMM_DEVICE float clamp(float value, float limit) {
  if (value > limit) value = limit;
  if (value < -limit) value = -limit;
  return value;
}

// Returns code * scale, both kept within their limits. Accepts any scale, NaN included.
template <class Codes>
ZCOMM_DEVICE void dequantize_special(const float (&biased)[kGroup], float scale, float limit, float (&terms)[kGroup]) {
  scale = clamp(scale, Float32::kLargestFinite);
#pragma unroll
  for (int i = 0; i < 16; ++i) terms[i] = clamp(__fmul_rn(__fadd_rn(biased[i], -Codes::kBias), scale), limit);
}

}  // namespace zcomm::gpu
