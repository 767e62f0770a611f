// Vectors of vectors.inl in AVX-512.

constexpr int kWidth = 64;
using Bytes = __m512i;
struct Words {
  __m512i low, high;  // halves
};
using Lanes = __m512i;

inline Bytes load_bytes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(std::uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
inline Bytes splat(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Bytes add(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes subtract_saturated(Bytes a, Bytes b) { return _mm512_subs_epu8(a, b); }
inline Bytes smaller(Bytes a, Bytes b) { return _mm512_min_epu8(a, b); }
inline Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes without(Bytes a, Bytes b) { return _mm512_andnot_si512(b, a); }
inline bool is_zero(Bytes a) { return _mm512_test_epi8_mask(a, a) == 0; }
inline std::uint64_t at_least(Bytes a, Bytes b) { return _mm512_cmpge_epu8_mask(a, b); }
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Bytes spread(const std::uint64_t* word, int) { return _mm512_movm_epi8(*word); }
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Bytes a) {
  return _mm512_movepi8_mask(_mm512_slli_epi16(a, 7 - kBit));
}
// Returns a * factors / 128; factors are at most 128.
inline Bytes shift_right(Bytes a, Bytes factors) {
  const __m512i low = _mm512_set1_epi16(255);
  const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(a, low), _mm512_and_si512(factors, low));
  const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(factors, 8));
  return _mm512_or_si512(_mm512_srli_epi16(even, 7), _mm512_andnot_si512(low, _mm512_slli_epi16(odd, 1)));
}
// Returns table[index[i]]; the table has 16 entries.
inline Bytes look_up(const std::uint8_t* table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}

using Sums = __m512i;
inline Sums no_sums() { return _mm512_setzero_si512(); }
inline Sums add_bytes(Sums sums, Bytes a) { return _mm512_add_epi32(sums, _mm512_sad_epu8(a, _mm512_setzero_si512())); }
// Adds ceil(z / 2) * weight; weights are below 128.
inline Sums add_weighted_halves(Sums sums, Bytes z, Bytes weight) {
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_avg_epu8(z, _mm512_setzero_si512()), weight);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline std::uint32_t total_of(Sums sums) { return static_cast<std::uint32_t>(_mm512_reduce_add_epi32(sums)); }

inline Words load_words(const std::uint16_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 32)}; }
inline void store_words(std::uint16_t* p, Words a) {
  _mm512_storeu_si512(p, a.low);
  _mm512_storeu_si512(p + 32, a.high);
}
template <int kShift>
inline __m512i field(__m512i a, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(a, kShift), _mm512_set1_epi16(static_cast<short>(mask)));
}
inline Bytes narrow(__m512i low, __m512i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
}
template <int kShift>
inline Bytes fields(Words a, int mask) {
  return narrow(field<kShift>(a.low, mask), field<kShift>(a.high, mask));
}
inline __m512i zigzag(__m512i a, __m512i b) {
  const __m512i d = _mm512_sub_epi16(b, a);
  const __m512i z = _mm512_xor_si512(_mm512_add_epi16(d, d), _mm512_srai_epi16(d, 15));
  return _mm512_min_epu16(z, _mm512_set1_epi16(255));
}
// Maps the difference from a to b to a natural number, at most 255.
inline Bytes zigzag(Words a, Words b) { return narrow(zigzag(a.low, b.low), zigzag(a.high, b.high)); }
inline __m512i undo_zigzag(__m512i a, __m256i z8) {
  const __m512i z = _mm512_cvtepu8_epi16(z8);
  const __m512i sign = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_and_si512(z, _mm512_set1_epi16(1)));
  return _mm512_add_epi16(a, _mm512_xor_si512(_mm512_srli_epi16(z, 1), sign));
}
inline Words undo_zigzag(Words a, Bytes z) {
  return {undo_zigzag(a.low, _mm512_castsi512_si256(z)), undo_zigzag(a.high, _mm512_extracti64x4_epi64(z, 1))};
}
inline __m512i zigzag_of_pairs(__m512i a, __m512i b) {
  const __m512i d = _mm512_sub_epi8(b, a);
  const __m512i z = _mm512_xor_si512(_mm512_add_epi8(d, d), _mm512_movm_epi8(_mm512_movepi8_mask(d)));
  const __m512i low = _mm512_and_si512(z, _mm512_set1_epi16(255)), high = _mm512_srli_epi16(z, 8);
  const __mmask32 in_low = _mm512_test_epi16_mask(low, low), in_both = _mm512_mask_test_epi16_mask(in_low, high, high);
  const __m512i one = _mm512_slli_epi16(_mm512_or_si512(low, high), 1), escape = _mm512_set1_epi16(255);
  const __m512i odd = _mm512_mask_sub_epi16(one, in_low, one, _mm512_set1_epi16(1));
  return _mm512_min_epu16(_mm512_mask_mov_epi16(odd, in_both, escape), escape);
}
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  return narrow(zigzag_of_pairs(a.low, b.low), zigzag_of_pairs(a.high, b.high));
}
inline __m512i undo_zigzag_of_pairs(__m512i a, __m256i z8) {
  const __m512i pair = _mm512_cvtepu8_epi16(z8), ones = _mm512_set1_epi8(1);
  const __m512i size = _mm512_srli_epi16(_mm512_add_epi16(pair, _mm512_set1_epi16(1)), 1);
  const __mmask32 in_high = _mm512_testn_epi16_mask(pair, _mm512_set1_epi16(1));
  const __m512i z = _mm512_mask_slli_epi16(size, in_high, size, 8);
  const __m512i sign = _mm512_sub_epi8(_mm512_setzero_si512(), _mm512_and_si512(z, ones));
  const __m512i half = _mm512_and_si512(_mm512_srli_epi16(z, 1), _mm512_set1_epi8(0x7f));
  return _mm512_add_epi8(a, _mm512_xor_si512(half, sign));
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  return {undo_zigzag_of_pairs(a.low, _mm512_castsi512_si256(z)),
          undo_zigzag_of_pairs(a.high, _mm512_extracti64x4_epi64(z, 1))};
}
inline bool differ(Words a, Words b) {
  return (_mm512_cmpneq_epi64_mask(a.low, b.low) | _mm512_cmpneq_epi64_mask(a.high, b.high)) != 0;
}

inline Lanes no_lanes() { return _mm512_setzero_si512(); }
inline __m512i products(__m512i words, const std::uint32_t* keys) {
  const __m512i x = _mm512_add_epi32(words, _mm512_loadu_si512(keys));
  return _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
}
inline Lanes add_products(Lanes lanes, Words a, const std::uint32_t* keys) {
  return _mm512_add_epi64(_mm512_add_epi64(lanes, products(a.low, keys)), products(a.high, keys + 16));
}
inline void store_lanes(std::uint64_t* p, Lanes lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_add_epi64(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
}
