// Numbers: the part of kernels.inl below the blocks.

#define ZCOMM_INLINE static inline __attribute__((always_inline))

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

// Memory is read and written through these, whatever its declared type is. `auto` would lose the attributes.
using Word32 = std::uint32_t __attribute__((may_alias));
using Word16 = std::uint16_t __attribute__((may_alias));
using WordPair = std::uint32_t __attribute__((may_alias, aligned(2)));  // two Word16, the first in the low half

constexpr std::uint32_t kAbs32 = 0x7fffffffu;
constexpr std::uint32_t kInfinity32 = 0x7f800000u;
constexpr std::uint32_t kNan32 = 0x7fc00000u;

ZCOMM_INLINE std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
ZCOMM_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
ZCOMM_INLINE std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// A register of floats, for the few loops that need intrinsics. The vectorizer of GCC 12 widens bytes in steps, with
// three shuffles where one will do, and does not know the conversions of float16.
#if defined(__AVX512F__)
#define ZCOMM_LANES 16
using Floats = __m512;
constexpr __mmask16 kAllLanes = 0xffff;  // the forms without a mask set off GCC's warning of uninitialized variables
ZCOMM_INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
ZCOMM_INLINE Floats load(const float* values) { return _mm512_loadu_ps(values); }
ZCOMM_INLINE void store(float* values, Floats floats) { _mm512_storeu_ps(values, floats); }
ZCOMM_INLINE Floats load_codes(const std::int8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm512_maskz_cvtepi32_ps(kAllLanes, _mm512_maskz_cvtepi8_epi32(kAllLanes, bytes));
}
ZCOMM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
ZCOMM_INLINE Floats canonical_nan(Floats floats) {
  return _mm512_mask_mov_ps(floats, _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q), broadcast(float_of(kNan32)));
}
// The larger of two magnitudes, `largest` having no sign; a NaN is larger than all others.
ZCOMM_INLINE Floats larger_magnitude(Floats largest, Floats floats) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(floats), _mm512_set1_epi32(kAbs32));
  return _mm512_castsi512_ps(_mm512_maskz_max_epi32(kAllLanes, _mm512_castps_si512(largest), magnitude));
}
ZCOMM_INLINE Floats load_bfloat16(const Word16* values) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, words), 16));
}
ZCOMM_INLINE Floats load_halves(const Word16* halves) {
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
ZCOMM_INLINE void store_halves(Word16* halves, Floats floats) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves),
                      _mm512_maskz_cvtps_ph(kAllLanes, floats, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
#define ZCOMM_LANES 8
using Floats = __m256;
ZCOMM_INLINE Floats broadcast(float value) { return _mm256_set1_ps(value); }
ZCOMM_INLINE Floats load(const float* values) { return _mm256_loadu_ps(values); }
ZCOMM_INLINE void store(float* values, Floats floats) { _mm256_storeu_ps(values, floats); }
ZCOMM_INLINE Floats load_codes(const std::int8_t* codes) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
ZCOMM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
ZCOMM_INLINE Floats canonical_nan(Floats floats) {
  return _mm256_blendv_ps(floats, broadcast(float_of(kNan32)), _mm256_cmp_ps(floats, floats, _CMP_UNORD_Q));
}
ZCOMM_INLINE Floats larger_magnitude(Floats largest, Floats floats) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(floats), _mm256_set1_epi32(kAbs32));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(largest), magnitude));
}
ZCOMM_INLINE Floats load_bfloat16(const Word16* values) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
ZCOMM_INLINE Floats load_halves(const Word16* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
ZCOMM_INLINE void store_halves(Word16* halves, Floats floats) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Value types: `widen` gives the float32 bits of a value, `narrow` the value nearest to a float32, and `narrow_finite`
// the same if that is not a NaN.

struct Float32 {
  using Bits = Word32;
  using Pattern = std::int32_t;  // signed: SSE2 has no unsigned 16-bit maximum, and the sign bit is masked off
  static constexpr Pattern kAbs = 0x7fffffff;
  ZCOMM_INLINE std::uint32_t widen(std::uint32_t bits) { return bits; }
  ZCOMM_INLINE std::uint32_t narrow_finite(float value) { return bits_of(value); }
  ZCOMM_INLINE std::uint32_t narrow(float value) { return value != value ? kNan32 : bits_of(value); }
#ifdef ZCOMM_LANES
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
  ZCOMM_INLINE Floats widen_lanes(const Bits* values) { return load_bfloat16(values); }
#endif
  // In the upper half of the word; the lower half is left over.
  ZCOMM_INLINE std::uint32_t round(float value) { return bits_of(value) + 0x7fffu + ((bits_of(value) >> 16) & 1u); }
  ZCOMM_INLINE std::uint16_t narrow_finite(float value) { return static_cast<std::uint16_t>(round(value) >> 16); }
  ZCOMM_INLINE std::uint16_t narrow(float value) { return value != value ? kNan : narrow_finite(value); }
};

struct Float16 {
  using Bits = Word16;
  using Pattern = std::int16_t;
  static constexpr Pattern kAbs = 0x7fff;

  // Subnormals come from a subtraction of normal numbers: arithmetic on subnormals is very slow.
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
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);  // the sum rounds at 2^-24
    std::uint32_t bits = magnitude < (113u << 23) ? subnormal : normal;
    bits = magnitude >= (143u << 23) ? 0x7c00u : bits;
    return static_cast<std::uint16_t>(magnitude > kInfinity32 ? 0x7e00u : bits | sign);
  }

#ifdef ZCOMM_LANES
  ZCOMM_INLINE Floats widen_lanes(const Bits* values) { return load_halves(values); }
#endif

  // round(values * factor)
  ZCOMM_INLINE void narrow_row(const float* values, std::int64_t count, float factor, Word16* halves) {
    std::int64_t done = 0;
#ifdef ZCOMM_LANES
    const Floats factors = broadcast(factor);
    for (; done + ZCOMM_LANES <= count; done += ZCOMM_LANES) {
      store_halves(halves + done, canonical_nan(load(values + done) * factors));
    }
#endif
#pragma omp simd
    for (std::int64_t i = done; i < count; ++i) halves[i] = narrow(values[i] * factor);
  }
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
