// Value types, sixteen values at a time. An instruction without a name in C++ is written in PTX. The C++ version next
// to it lets tests run the kernels on a host.
//
// Nothing here may be contracted or approximated: results have the bits of the host codec.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define ZCOMM_DEVICE __device__ __forceinline__

namespace zcomm::gpu {

// Values that a thread handles at once: 16 bytes of int8 codes, 8 of int4 codes. Blocks are multiples of it.
inline constexpr std::uint32_t kGroup = 16;

inline constexpr std::uint32_t kAbs32 = 0x7fffffffu;
inline constexpr std::uint32_t kInfinity32 = 0x7f800000u;
inline constexpr std::uint32_t kNan32 = 0x7fc00000u;

ZCOMM_DEVICE std::uint32_t larger_of(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
ZCOMM_DEVICE std::uint32_t smaller_of(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

// Returns the larger of two magnitudes, NaN if either is NaN, with any sign and payload. `type` is a 32-bit PTX type.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
#define ZCOMM_LARGER_MAGNITUDE(type)                                               \
  std::uint32_t larger;                                                            \
  asm("max.NaN.xorsign.abs." type " %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b)); \
  return larger
#elif defined(__CUDA_ARCH__)
#define ZCOMM_LARGER_MAGNITUDE(type)                                                           \
  std::uint32_t larger;                                                                        \
  asm("{ .reg .b32 x, y; abs." type " x, %1; abs." type " y, %2; max.NaN." type " %0, x, y; }" \
      : "=r"(larger)                                                                           \
      : "r"(a), "r"(b));                                                                       \
  return larger
#endif

// Value types. Each has kWords words in a group and these functions on a word and the values in it:
//   widen    converts to float32
//   narrow   rounds float32 values to the nearest, the first in the low half; NaNs with any payload
//   larger   larger magnitude, by value: NaN if either is NaN, with any sign and payload
//   float32_bits    float32 bits of the largest magnitude in a word, whatever its sign
struct Float32 {
  static constexpr int kWords = 16;
  static constexpr int kBytes = 4;
  static constexpr float kLargestFinite = 0x1.fffffep127f;

  static ZCOMM_DEVICE void widen(const std::uint32_t (&words)[kWords], float (&values)[kGroup]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = __uint_as_float(words[i]);
  }
  static ZCOMM_DEVICE void narrow(const float (&values)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = __float_as_uint(values[i]);
  }
  static ZCOMM_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
    ZCOMM_LARGER_MAGNITUDE("f32");
#else
    return larger_of(a & kAbs32, b & kAbs32);
#endif
  }
  static ZCOMM_DEVICE std::uint32_t float32_bits(std::uint32_t value) { return value & kAbs32; }
  static ZCOMM_DEVICE std::uint32_t canonical(std::uint32_t word) {
    return (word & kAbs32) > kInfinity32 ? kNan32 : word;
  }
};

// Common part of the two 16-bit types, of which `Type` is one.
template <class Type, std::uint32_t kInfinity, std::uint32_t kNan>
struct Halves {
  static constexpr int kWords = 8;
  static constexpr int kBytes = 2;
  static constexpr std::uint32_t kAbs = 0x7fff7fffu;

  static ZCOMM_DEVICE void narrow(const float (&values)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Type::narrow_pair(values[2 * i], values[2 * i + 1]);
  }
  static ZCOMM_DEVICE std::uint32_t canonical(std::uint32_t word) {
    if ((word & 0x7fffu) > kInfinity) word = (word & 0xffff0000u) | kNan;
    if (((word >> 16) & 0x7fffu) > kInfinity) word = (word & 0xffffu) | (kNan << 16);
    return word;
  }
#ifndef __CUDA_ARCH__
  static ZCOMM_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
    a &= kAbs, b &= kAbs;
    return larger_of(a & 0xffffu, b & 0xffffu) | larger_of(a & 0xffff0000u, b & 0xffff0000u);
  }
  static ZCOMM_DEVICE std::uint32_t narrow_pair(float low, float high) {
    return Type::narrow_one(low) | (Type::narrow_one(high) << 16);
  }
#endif
};

struct Bfloat16 : Halves<Bfloat16, 0x7f80u, 0x7fc0u> {
  static constexpr float kLargestFinite = 0x1.fep127f;

  static ZCOMM_DEVICE void widen(const std::uint32_t (&words)[kWords], float (&values)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static ZCOMM_DEVICE std::uint32_t float32_bits(std::uint32_t pair) {
    return larger_of((pair & 0x7fffu) << 16, pair & 0x7fff0000u);
  }
#ifdef __CUDA_ARCH__
  static ZCOMM_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) { ZCOMM_LARGER_MAGNITUDE("bf16x2"); }
  static ZCOMM_DEVICE std::uint32_t narrow_pair(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
#else
  static ZCOMM_DEVICE std::uint32_t narrow_one(float value) {
    const std::uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // the hardware's NaN
  }
#endif
};

struct Float16 : Halves<Float16, 0x7c00u, 0x7e00u> {
  static constexpr float kLargestFinite = 65504.0f;

  static ZCOMM_DEVICE void widen(const std::uint32_t (&words)[kWords], float (&values)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen_pair(words[i], values[2 * i], values[2 * i + 1]);
  }
  static ZCOMM_DEVICE std::uint32_t float32_bits(std::uint32_t pair) {
    float low, high;
    widen_pair(pair & kAbs, low, high);
    return larger_of(__float_as_uint(low), __float_as_uint(high));
  }
#ifdef __CUDA_ARCH__
  static ZCOMM_DEVICE std::uint32_t larger(std::uint32_t a, std::uint32_t b) { ZCOMM_LARGER_MAGNITUDE("f16x2"); }
  static ZCOMM_DEVICE void widen_pair(std::uint32_t pair, float& low, float& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(pair));
  }
  static ZCOMM_DEVICE std::uint32_t narrow_pair(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
#else
  static ZCOMM_DEVICE void widen_pair(std::uint32_t pair, float& low, float& high) {
    low = widen_one(pair & 0xffffu), high = widen_one(pair >> 16);
  }
  static ZCOMM_DEVICE float widen_one(std::uint32_t bits) {
    const std::uint32_t moved = (bits & 0x7fffu) << 13;
    std::uint32_t magnitude = moved + (112u << 23);
    if (moved < (1u << 23)) magnitude = __float_as_uint(__uint_as_float(moved + (113u << 23)) - 0x1p-14f);
    if (moved >= (31u << 23)) magnitude = moved | kInfinity32;
    return __uint_as_float(((bits & 0x8000u) << 16) | magnitude);
  }
  static ZCOMM_DEVICE std::uint32_t narrow_one(float value) {
    const std::uint32_t sign = (__float_as_uint(value) >> 16) & 0x8000u;
    const std::uint32_t magnitude = __float_as_uint(value) & kAbs32;
    if (magnitude > kInfinity32) return 0x7fffu;  // the hardware's NaN
    if (magnitude >= (143u << 23)) return sign | 0x7c00u;
    if (magnitude < (113u << 23)) return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - (126u << 23));
    return sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
  }
#endif
};

#undef ZCOMM_LARGER_MAGNITUDE

// Returns the float32 bits of a group's largest magnitude; at least kInfinity32 if it holds a NaN or infinity.
template <class Type>
ZCOMM_DEVICE std::uint32_t absmax(const std::uint32_t (&words)[Type::kWords]) {
  std::uint32_t largest[Type::kWords / 2];
#pragma unroll
  for (int i = 0; i < Type::kWords / 2; ++i) largest[i] = Type::larger(words[i], words[i + Type::kWords / 2]);
#pragma unroll
  for (int step = Type::kWords / 4; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) largest[i] = Type::larger(largest[i], largest[i + step]);
  }
  return Type::float32_bits(largest[0]);
}

// Gives all NaNs the payload that the host codec writes.
template <class Type>
ZCOMM_DEVICE void make_nans_canonical(std::uint32_t (&words)[Type::kWords]) {
  if (absmax<Type>(words) <= kInfinity32) return;
#pragma unroll
  for (int i = 0; i < Type::kWords; ++i) words[i] = Type::canonical(words[i]);
}

}  // namespace zcomm::gpu
