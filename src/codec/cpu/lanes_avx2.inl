// Register operations for AVX2: see lanes.inl.

#define ZCOMM_LANES 8
using Floats = __m256;
using Register = __m256i;

ZCOMM_INLINE Floats broadcast(float value) { return _mm256_set1_ps(value); }
ZCOMM_INLINE Ints load_codes(const std::int8_t* codes) {
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}
ZCOMM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
ZCOMM_INLINE __m256i upper_half(Register bits) { return bits; }
ZCOMM_INLINE __m256i lower_half(Register bits) { return bits; }

ZCOMM_INLINE void deinterleave(Floats& first, Floats& second) {
  const Floats low = _mm256_permute2f128_ps(first, second, 0x20), high = _mm256_permute2f128_ps(first, second, 0x31);
  first = _mm256_shuffle_ps(low, high, 0x88);
  second = _mm256_shuffle_ps(low, high, 0xdd);
}

ZCOMM_INLINE __m256i to_codes(const Floats* group) {
  const __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32(group[0]), _mm256_cvtps_epi32(group[1]));
  const __m256i second = _mm256_packs_epi32(_mm256_cvtps_epi32(group[2]), _mm256_cvtps_epi32(group[3]));
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <int kBits>
ZCOMM_INLINE Register join_pairs(const Floats* group) {
  const Register even = _mm256_packs_epi32(_mm256_cvtps_epi32(group[0]), _mm256_cvtps_epi32(group[2]));
  const Register odd = _mm256_packs_epi32(_mm256_cvtps_epi32(group[1]), _mm256_cvtps_epi32(group[3]));
  return _mm256_or_si256(_mm256_slli_epi16(odd, kBits), _mm256_and_si256(even, _mm256_set1_epi16((1 << kBits) - 1)));
}
ZCOMM_INLINE __m256i pairs_to_codes(const Floats* group) {
  return _mm256_permute4x64_epi64(join_pairs<8>(group), 0xd8);
}
ZCOMM_INLINE __m128i pairs_to_nibbles(const Floats* group) {
  const Register words = join_pairs<4>(group);
  return _mm_shuffle_epi32(_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)), 0xd8);
}

ZCOMM_INLINE Floats load_bfloat16(const Word16* values) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
ZCOMM_INLINE Register upper_halves(Ints first, Ints second) {
  const Register words = _mm256_packus_epi32(_mm256_srli_epi32(reinterpret_cast<Register>(first), 16),
                                             _mm256_srli_epi32(reinterpret_cast<Register>(second), 16));
  return _mm256_permute4x64_epi64(words, 0xd8);
}
ZCOMM_INLINE Floats load_halves(const Word16* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
ZCOMM_INLINE Register to_halves(Floats first, Floats second) {
  return _mm256_set_m128i(_mm256_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT));
}

#include "codec/cpu/lanes_x86.inl"
