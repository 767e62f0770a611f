// Vectors of vectors_x86.inl: what AVX-512 and AVX2 have in different forms.

constexpr int kWidth = 64;
using Vector = __m512i;

inline Vector load(const void* p) { return _mm512_loadu_si512(p); }
inline void store(void* p, Vector a) { _mm512_storeu_si512(p, a); }
inline Vector subtract_saturated(Vector a, Vector b) { return _mm512_subs_epu8(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm512_min_epu8(a, b); }
inline Vector smaller_words(Vector a, Vector b) { return _mm512_min_epu16(a, b); }
inline bool is_zero(Vector a) { return _mm512_test_epi8_mask(a, a) == 0; }
inline std::uint64_t at_least(Vector a, Vector b) { return _mm512_cmpge_epu8_mask(a, b); }
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Vector spread(const std::uint64_t* word, int) { return _mm512_movm_epi8(*word); }
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Vector a) {
  return _mm512_movepi8_mask(_mm512_slli_epi16(a, 7 - kBit));
}
// Returns table[index[i]]; the table has 16 entries.
inline Vector look_up(const std::uint8_t* table, Vector index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline Vector sums_of_bytes(Vector a) { return _mm512_sad_epu8(a, _mm512_setzero_si512()); }
inline Vector sums_of_halves(Vector z, Vector weight) {
  const Vector pairs = _mm512_maddubs_epi16(_mm512_avg_epu8(z, _mm512_setzero_si512()), weight);
  return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
inline std::uint32_t total_of(Vector sums) { return static_cast<std::uint32_t>(_mm512_reduce_add_epi32(sums)); }
// Narrows numbers of at most 255 to bytes, and widens them.
inline Vector narrow(Vector low, Vector high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
}
inline Vector widen_low(Vector a) { return _mm512_cvtepu8_epi16(_mm512_castsi512_si256(a)); }
inline Vector widen_high(Vector a) { return _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(a, 1)); }
inline Vector zigzag_of_pairs(Vector a, Vector b) {
  const Vector d = _mm512_sub_epi8(b, a);
  const Vector z = _mm512_xor_si512(_mm512_add_epi8(d, d), _mm512_movm_epi8(_mm512_movepi8_mask(d)));
  const Vector low = _mm512_and_si512(z, _mm512_set1_epi16(255)), high = _mm512_srli_epi16(z, 8);
  const __mmask32 in_low = _mm512_test_epi16_mask(low, low), in_both = _mm512_mask_test_epi16_mask(in_low, high, high);
  const Vector one = _mm512_slli_epi16(_mm512_or_si512(low, high), 1), escape = _mm512_set1_epi16(255);
  const Vector odd = _mm512_mask_sub_epi16(one, in_low, one, _mm512_set1_epi16(1));
  return _mm512_min_epu16(_mm512_mask_mov_epi16(odd, in_both, escape), escape);
}
inline Vector undo_zigzag_of_pairs(Vector a, Vector pair) {
  const Vector size = _mm512_srli_epi16(_mm512_add_epi16(pair, _mm512_set1_epi16(1)), 1);
  const __mmask32 in_high = _mm512_testn_epi16_mask(pair, _mm512_set1_epi16(1));
  const Vector z = _mm512_mask_slli_epi16(size, in_high, size, 8);
  const Vector sign = _mm512_sub_epi8(_mm512_setzero_si512(), _mm512_and_si512(z, _mm512_set1_epi8(1)));
  const Vector half = _mm512_and_si512(_mm512_srli_epi16(z, 1), _mm512_set1_epi8(0x7f));
  return _mm512_add_epi8(a, _mm512_xor_si512(half, sign));
}
inline Vector product_of_low_halves(Vector a, Vector b) { return _mm512_mul_epu32(a, b); }
inline void store_lanes(std::uint64_t* p, Vector lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_add_epi64(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
}
