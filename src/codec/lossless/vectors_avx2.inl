// Vectors of vectors.inl in AVX2.

constexpr int kWidth = 32;
using Bytes = __m256i;
struct Words {
  __m256i low, high;  // halves
};
using Lanes = __m256i;

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }

inline Bytes load_bytes(const std::uint8_t* p) { return load(p); }
inline void store_bytes(std::uint8_t* p, Bytes a) { store(p, a); }
inline Bytes splat(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Bytes add(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes subtract_saturated(Bytes a, Bytes b) { return _mm256_subs_epu8(a, b); }
inline Bytes smaller(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
inline Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes without(Bytes a, Bytes b) { return _mm256_andnot_si256(b, a); }
inline bool is_zero(Bytes a) { return _mm256_testz_si256(a, a) != 0; }
inline std::uint64_t at_least(Bytes a, Bytes b) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(a, b), a)));
}
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Bytes spread(const std::uint64_t* word, int part) {
  int bits;
  __builtin_memcpy(&bits, reinterpret_cast<const char*>(word) + part / 8, 4);
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Bytes a) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(a, 7 - kBit)));
}
// Returns a * factors / 128; factors are at most 128.
inline Bytes shift_right(Bytes a, Bytes factors) {
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_mullo_epi16(_mm256_and_si256(a, low), _mm256_and_si256(factors, low));
  const __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(factors, 8));
  return _mm256_or_si256(_mm256_srli_epi16(even, 7), _mm256_andnot_si256(low, _mm256_slli_epi16(odd, 1)));
}
// Returns table[index[i]]; the table has 16 entries.
inline Bytes look_up(const std::uint8_t* table, Bytes index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index);
}

using Sums = __m256i;
inline Sums no_sums() { return _mm256_setzero_si256(); }
inline Sums add_bytes(Sums sums, Bytes a) { return _mm256_add_epi32(sums, _mm256_sad_epu8(a, _mm256_setzero_si256())); }
// Adds ceil(z / 2) * weight; weights are below 128.
inline Sums add_weighted_halves(Sums sums, Bytes z, Bytes weight) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_avg_epu8(z, _mm256_setzero_si256()), weight);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline std::uint32_t total_of(Sums sums) {
  std::uint32_t parts[8], total = 0;
  store(parts, sums);
  for (const std::uint32_t part : parts) total += part;
  return total;
}

inline Words load_words(const std::uint16_t* p) { return {load(p), load(p + 16)}; }
inline void store_words(std::uint16_t* p, Words a) {
  store(p, a.low);
  store(p + 16, a.high);
}
// Narrows numbers of at most 255 to bytes.
inline Bytes narrow(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
}
template <int kShift>
inline Bytes fields(Words a, int mask) {
  const __m256i ones = _mm256_set1_epi16(static_cast<short>(mask));
  return narrow(_mm256_and_si256(_mm256_srli_epi16(a.low, kShift), ones),
                _mm256_and_si256(_mm256_srli_epi16(a.high, kShift), ones));
}
inline __m256i zigzag(__m256i a, __m256i b) {
  const __m256i d = _mm256_sub_epi16(b, a);
  const __m256i z = _mm256_xor_si256(_mm256_add_epi16(d, d), _mm256_srai_epi16(d, 15));
  return _mm256_min_epu16(z, _mm256_set1_epi16(255));
}
// Maps the difference from a to b to a natural number, at most 255.
inline Bytes zigzag(Words a, Words b) { return narrow(zigzag(a.low, b.low), zigzag(a.high, b.high)); }
inline __m256i undo_zigzag(__m256i a, __m128i z8) {
  const __m256i z = _mm256_cvtepu8_epi16(z8);
  const __m256i sign = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi16(1)));
  return _mm256_add_epi16(a, _mm256_xor_si256(_mm256_srli_epi16(z, 1), sign));
}
inline Words undo_zigzag(Words a, Bytes z) {
  return {undo_zigzag(a.low, _mm256_castsi256_si128(z)), undo_zigzag(a.high, _mm256_extracti128_si256(z, 1))};
}
inline __m256i zigzag_of_pairs(__m256i a, __m256i b) {
  const __m256i zero = _mm256_setzero_si256(), escape = _mm256_set1_epi16(255);
  const __m256i d = _mm256_sub_epi8(b, a);
  const __m256i z = _mm256_xor_si256(_mm256_add_epi8(d, d), _mm256_cmpgt_epi8(zero, d));
  const __m256i low = _mm256_and_si256(z, escape), high = _mm256_srli_epi16(z, 8);
  const __m256i in_low = _mm256_cmpgt_epi16(low, zero);  // -1
  const __m256i in_both = _mm256_and_si256(in_low, _mm256_cmpgt_epi16(high, zero));
  const __m256i odd = _mm256_add_epi16(_mm256_slli_epi16(_mm256_or_si256(low, high), 1), in_low);
  return _mm256_min_epu16(_mm256_or_si256(odd, in_both), escape);
}
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  return narrow(zigzag_of_pairs(a.low, b.low), zigzag_of_pairs(a.high, b.high));
}
inline __m256i undo_zigzag_of_pairs(__m256i a, __m128i z8) {
  const __m256i pair = _mm256_cvtepu8_epi16(z8), one = _mm256_set1_epi16(1);
  const __m256i size = _mm256_srli_epi16(_mm256_add_epi16(pair, one), 1);
  const __m256i in_low = _mm256_cmpeq_epi16(_mm256_and_si256(pair, one), one);
  const __m256i z = _mm256_blendv_epi8(_mm256_slli_epi16(size, 8), size, in_low);
  const __m256i sign = _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi8(1)));
  const __m256i half = _mm256_and_si256(_mm256_srli_epi16(z, 1), _mm256_set1_epi8(0x7f));
  return _mm256_add_epi8(a, _mm256_xor_si256(half, sign));
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  return {undo_zigzag_of_pairs(a.low, _mm256_castsi256_si128(z)),
          undo_zigzag_of_pairs(a.high, _mm256_extracti128_si256(z, 1))};
}
inline bool differ(Words a, Words b) {
  return !is_zero(_mm256_or_si256(_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)));
}

inline Lanes no_lanes() { return _mm256_setzero_si256(); }
inline __m256i products(__m256i words, const std::uint32_t* keys) {
  const __m256i x = _mm256_add_epi32(words, load(keys));
  return _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
}
inline Lanes add_products(Lanes lanes, Words a, const std::uint32_t* keys) {
  return _mm256_add_epi64(_mm256_add_epi64(lanes, products(a.low, keys)), products(a.high, keys + 8));
}
inline void store_lanes(std::uint64_t* p, Lanes lanes) { store(p, lanes); }
