// Number conversions: the part of kernels.inl below the blocks.

#define ZCOMM_INLINE static inline __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

// Types for memory access that may alias any declared type. `auto` would lose the attributes.
using Word32 = std::uint32_t __attribute__((may_alias));
using Word16 = std::uint16_t __attribute__((may_alias));
using WordPair = std::uint32_t __attribute__((may_alias, aligned(2)));  // two Word16, the first in the low half

constexpr std::uint32_t kAbs32 = 0x7fffffffu;
constexpr std::uint32_t kInfinity32 = 0x7f800000u;
constexpr std::uint32_t kNan32 = 0x7fc00000u;

ZCOMM_INLINE std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
ZCOMM_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
ZCOMM_INLINE std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
ZCOMM_INLINE std::int64_t max_of(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

#include "codec/cpu/lanes.inl"

// Value types. `widen` gives the float32 bits of a value; `narrow` rounds a float32 to the nearest value;
// `narrow_finite` does the same, but for NaN.

struct Float32 {
  using Bits = Word32;
  using Pattern = std::int32_t;  // signed: SSE2 has no unsigned 16-bit maximum, and the sign bit is masked off
  static constexpr Pattern kAbs = 0x7fffffff;
  ZCOMM_INLINE std::uint32_t widen(std::uint32_t bits) { return bits; }
  ZCOMM_INLINE std::uint32_t narrow_finite(float value) { return bits_of(value); }
  ZCOMM_INLINE std::uint32_t narrow(float value) { return value != value ? kNan32 : bits_of(value); }
#ifdef ZCOMM_LANES
  using Patterns = Pattern __attribute__((vector_size(sizeof(Register))));
  ZCOMM_INLINE Floats widen_lanes(const Bits* values) { return load(reinterpret_cast<const float*>(values)); }
#endif
};

struct Bfloat16 {
  using Bits = Word16;
  using Pattern = std::int16_t;
  static constexpr Pattern kAbs = 0x7fff;
  static constexpr std::uint16_t kNan = 0x7fc0;
  ZCOMM_INLINE std::uint32_t widen(std::uint32_t bits) { return bits << 16; }
#ifdef ZCOMM_LANES
  using Patterns = Pattern __attribute__((vector_size(sizeof(Register))));
  ZCOMM_INLINE Floats widen_lanes(const Bits* values) { return load_bfloat16(values); }
  using Words = std::uint32_t __attribute__((vector_size(sizeof(Floats))));
  // Splits a register of values into one of even and one of odd elements.
  ZCOMM_INLINE void widen_pairs(const Bits* values, Floats& even, Floats& odd) {
    const Words pairs = reinterpret_cast<Words>(load_register(values));
    even = reinterpret_cast<Floats>(pairs << 16);
    odd = reinterpret_cast<Floats>(pairs & 0xffff0000u);
  }
  ZCOMM_INLINE Words round_lanes(Floats floats) {  // result in the upper half of each word
    const Words bits = reinterpret_cast<Words>(floats);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  ZCOMM_INLINE Register narrow_lanes(Floats first, Floats second) {
    return upper_halves(reinterpret_cast<Ints>(round_lanes(first)), reinterpret_cast<Ints>(round_lanes(second)));
  }
  // Joins registers of even and odd elements: each pair is a word.
  ZCOMM_INLINE Register narrow_pairs(Floats even, Floats odd) {
    return reinterpret_cast<Register>((round_lanes(even) >> 16) | (round_lanes(odd) & 0xffff0000u));
  }
#endif
  // Rounds into the upper half of the word; the lower half is undefined.
  ZCOMM_INLINE std::uint32_t round(float value) { return bits_of(value) + 0x7fffu + ((bits_of(value) >> 16) & 1u); }
  ZCOMM_INLINE std::uint16_t narrow_finite(float value) { return static_cast<std::uint16_t>(round(value) >> 16); }
  ZCOMM_INLINE std::uint16_t narrow(float value) { return value != value ? kNan : narrow_finite(value); }
};

struct Float16 {
  using Bits = Word16;
  using Pattern = std::int16_t;
  static constexpr Pattern kAbs = 0x7fff;

  // Builds subnormals by a subtraction of normal numbers: arithmetic on subnormals is very slow.
  ZCOMM_INLINE std::uint32_t widen(std::uint32_t bits) {
    const std::uint32_t moved = (bits & 0x7fffu) << 13;
    const std::uint32_t normal = moved + (112u << 23);
    const std::uint32_t subnormal = bits_of(float_of(moved + (113u << 23)) - 0x1p-14f);
    std::uint32_t magnitude = moved < (1u << 23) ? subnormal : normal;
    magnitude = moved >= (31u << 23) ? moved | kInfinity32 : magnitude;
    return ((bits & 0x8000u) << 16) | magnitude;
  }

  ZCOMM_INLINE std::uint16_t narrow(float value) {
    const std::uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits_of(value) & kAbs32;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);  // adding 0.5 rounds at 2^-24
    std::uint32_t bits = magnitude < (113u << 23) ? subnormal : normal;
    bits = magnitude >= (143u << 23) ? 0x7c00u : bits;
    return static_cast<std::uint16_t>(magnitude > kInfinity32 ? 0x7e00u : bits | sign);
  }

  ZCOMM_INLINE std::uint16_t narrow_finite(float value) { return narrow(value); }

#ifdef ZCOMM_LANES
  using Patterns = Pattern __attribute__((vector_size(sizeof(Register))));
  ZCOMM_INLINE Floats widen_lanes(const Bits* values) { return load_halves(values); }
  ZCOMM_INLINE Register narrow_lanes(Floats first, Floats second) { return to_halves(first, second); }
#endif
};

template <class Type>
ZCOMM_INLINE void widen_row(const typename Type::Bits* values, std::int64_t count, float* widened) {
  std::int64_t done = 0;
#ifdef ZCOMM_LANES
  for (; done + ZCOMM_LANES <= count; done += ZCOMM_LANES) store(widened + done, Type::widen_lanes(values + done));
#endif
#pragma omp simd
  for (std::int64_t i = done; i < count; ++i) widened[i] = float_of(Type::widen(values[i]));
}
