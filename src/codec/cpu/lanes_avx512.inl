// Register operations for AVX-512: see lanes.inl. Masked forms avoid GCC's warning about uninitialized variables.

#define ZCOMM_LANES 16
using Floats = __m512;
using Register = __m512i;
constexpr __mmask16 kAllLanes = 0xffff;

ZCOMM_INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
ZCOMM_INLINE void write_past_caches(void* data, Register bits) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(data), bits);
}
ZCOMM_INLINE Ints load_codes(const std::int8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepi8_epi32(kAllLanes, bytes));
}
ZCOMM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
ZCOMM_INLINE __m256i upper_half(Register bits) { return __builtin_shufflevector(bits, bits, 4, 5, 6, 7); }
ZCOMM_INLINE __m256i lower_half(Register bits) { return __builtin_shufflevector(bits, bits, 0, 1, 2, 3); }

ZCOMM_INLINE void deinterleave(Floats& first, Floats& second) {
  const Register even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Register odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const Floats of_even = _mm512_permutex2var_ps(first, even, second);
  second = _mm512_permutex2var_ps(first, odd, second);
  first = of_even;
}

ZCOMM_INLINE __m256i to_codes(const Floats* group) {
  const Register words =
      _mm512_packs_epi32(_mm512_maskz_cvtps_epi32(kAllLanes, group[0]), _mm512_maskz_cvtps_epi32(kAllLanes, group[1]));
  const Register in_order = _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
  return _mm512_maskz_cvtepi16_epi8(0xffffffff, in_order);
}

template <int kBits>
ZCOMM_INLINE Register join_pairs(const Floats* group) {
  const Register even = _mm512_maskz_cvtps_epi32(kAllLanes, group[0]);
  const Register odd = _mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtps_epi32(kAllLanes, group[1]), kBits);
  return _mm512_ternarylogic_epi32(odd, even, _mm512_set1_epi32((1 << kBits) - 1), 0xf8);  // odd | (even & the mask)
}
ZCOMM_INLINE __m256i pairs_to_codes(const Floats* group) {
  return _mm512_maskz_cvtepi32_epi16(kAllLanes, join_pairs<8>(group));
}
ZCOMM_INLINE __m128i pairs_to_nibbles(const Floats* group) {
  return _mm512_maskz_cvtepi32_epi8(kAllLanes, join_pairs<4>(group));
}

ZCOMM_INLINE Floats load_bfloat16(const Word16* values) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, words), 16));
}
ZCOMM_INLINE Register upper_halves(Ints first, Ints second) {
  const Register words =
      _mm512_packus_epi32(_mm512_maskz_srli_epi32(kAllLanes, reinterpret_cast<Register>(first), 16),
                          _mm512_maskz_srli_epi32(kAllLanes, reinterpret_cast<Register>(second), 16));
  return _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
}
ZCOMM_INLINE Floats load_halves(const Word16* halves) {
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
ZCOMM_INLINE Register to_halves(Floats first, Floats second) {
  const __m256i low = _mm512_maskz_cvtps_ph(kAllLanes, first, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_maskz_cvtps_ph(kAllLanes, second, _MM_FROUND_TO_NEAREST_INT);
  return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1);
}

#include "codec/cpu/lanes_x86.inl"
