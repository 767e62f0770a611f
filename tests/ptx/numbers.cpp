#include "numbers.hpp"

#include <algorithm>

#include "settings.hpp"

namespace ptx {
namespace {

constexpr u32 kInfinity16 = 0x7c00u;
constexpr u32 kInfinityB16 = 0x7f80u;

// Returns a random NaN whose exponent has these bits; `unit` is the lowest of them.
u32 any_nan(u32 infinity, u32 unit, u32 sign) {
  u32 payload = random_bits() & (unit - 1);
  if (payload == 0) payload = 1;
  return infinity | payload | (random_bits() & sign);
}

u32 make_half_nan(u32 infinity) {
  if (!settings().random_nans) return 0x7fffu;
  return any_nan(infinity, infinity & (0 - infinity), 0x8000u);
}

// Returns the larger number; +0 is above -0.
u32 larger_number(u32 a, u32 b, u32 sign) {
  const auto key = [sign](u32 bits) {
    const i64 magnitude = bits & (sign - 1);
    return (bits & sign) != 0 ? -magnitude - 1 : magnitude;
  };
  return key(a) >= key(b) ? a : b;
}

u32 larger(u32 a, u32 b, u32 sign, bool xorsign) {
  if (!xorsign) return larger_number(a, b, sign);
  return std::max(a & (sign - 1), b & (sign - 1)) | ((a ^ b) & sign);
}

}  // namespace

u32 make_nan() { return settings().random_nans ? any_nan(kInfinity, 1u << 23, ~kAbs) : kAbs; }

u32 to_bfloat16(float value) {
  const u32 bits = as_bits(value);
  return is_nan(bits) ? make_half_nan(kInfinityB16) : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

u32 to_float16(float value) {
  const u32 bits = as_bits(value), magnitude = bits & kAbs, sign = bits >> 16 & 0x8000u;
  if (magnitude > kInfinity) return make_half_nan(kInfinity16);
  if (magnitude >= as_bits(65520.0f)) return sign | kInfinity16;
  if (magnitude < as_bits(0x1p-14f)) return sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f));  // by 2^-24
  return sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
}

float from_float16(u32 half) {
  const u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return as_float(sign | kInfinity | fraction << 13);
  if (exponent == 0) return as_float(sign | as_bits(static_cast<float>(fraction) * 0x1p-24f));
  return as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

u32 larger_half(u32 a, u32 b, u32 infinity, bool xorsign) {
  if ((a & 0x7fffu) > infinity || (b & 0x7fffu) > infinity) return make_half_nan(infinity);
  return larger(a, b, 0x8000u, xorsign);
}

float larger_float(float a, float b, bool xorsign) {
  if (is_nan(as_bits(a)) || is_nan(as_bits(b))) return as_float(make_nan());
  return as_float(larger(as_bits(a), as_bits(b), ~kAbs, xorsign));
}

float approximate_reciprocal(float value) {
  const u32 sign = as_bits(value) & ~kAbs, magnitude = as_bits(value) & kAbs;
  constexpr u32 kSmallestNormal = 1u << 23;
  if (magnitude > kInfinity) return as_float(make_nan());
  if (magnitude == kInfinity) return as_float(sign);
  if (magnitude < kSmallestNormal) return as_float(sign | kInfinity);
  const i32 error =
      settings().random_reciprocal ? static_cast<i32>(random_bits() % 3) - 1 : settings().reciprocal_error;
  const u32 result = as_bits(1.0f / as_float(magnitude)) + static_cast<u32>(error);
  return as_float(sign | (result < kSmallestNormal ? 0 : result));
}

}  // namespace ptx
