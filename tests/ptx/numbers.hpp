// Floating-point operations of PTX that C++ lacks, on bit patterns.
#pragma once

#include <bit>

#include "integers.hpp"

namespace ptx {

inline float as_float(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 as_bits(float value) { return std::bit_cast<u32>(value); }

inline constexpr u32 kAbs = 0x7fffffffu;
inline constexpr u32 kInfinity = 0x7f800000u;
inline bool is_nan(u32 bits) { return (bits & kAbs) > kInfinity; }

// Returns the NaN that an instruction makes: 0x7fffffff, or any with Settings::random_nans.
u32 make_nan();

// Rounds to nearest, ties to even; overflow becomes infinity, NaNs as above.
u32 to_float16(float value);
u32 to_bfloat16(float value);
float from_float16(u32 half);

// max.NaN of two 16-bit floats whose infinity has these bits; with `xorsign`, of their magnitudes, with the product's
// sign.
u32 larger_half(u32 a, u32 b, u32 infinity, bool xorsign);
float larger_float(float a, float b, bool xorsign);

// Computes rcp.approx.ftz, with the error in the settings.
float approximate_reciprocal(float value);

}  // namespace ptx
