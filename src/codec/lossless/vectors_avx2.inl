// Vectors of vectors_x86.inl: what AVX2 and AVX-512 have in different forms.

constexpr int kWidth = 32;
using Vector = __m256i;

inline Vector load(const void* p) { return _mm256_loadu_si256(static_cast<const Vector*>(p)); }
inline void store(void* p, Vector a) { _mm256_storeu_si256(static_cast<Vector*>(p), a); }
inline Vector subtract_saturated(Vector a, Vector b) { return _mm256_subs_epu8(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm256_min_epu8(a, b); }
inline Vector smaller_words(Vector a, Vector b) { return _mm256_min_epu16(a, b); }
inline bool is_zero(Vector a) { return _mm256_testz_si256(a, a) != 0; }
inline std::uint64_t at_least(Vector a, Vector b) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(a, b), a)));
}
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Vector spread(const std::uint64_t* word, int part) {
  int bits;
  __builtin_memcpy(&bits, reinterpret_cast<const char*>(word) + part / 8, 4);
  const Vector byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const Vector bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const Vector bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Vector a) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(a, 7 - kBit)));
}
// Returns table[index[i]]; the table has 16 entries.
inline Vector look_up(const std::uint8_t* table, Vector index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index);
}
inline Vector sums_of_bytes(Vector a) { return _mm256_sad_epu8(a, _mm256_setzero_si256()); }
inline Vector sums_of_halves(Vector z, Vector weight) {
  const Vector pairs = _mm256_maddubs_epi16(_mm256_avg_epu8(z, _mm256_setzero_si256()), weight);
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline std::uint32_t total_of(Vector sums) {
  std::uint32_t parts[8], total = 0;
  store(parts, sums);
  for (const std::uint32_t part : parts) total += part;
  return total;
}
// Narrows numbers of at most 255 to bytes, and widens them.
inline Vector narrow(Vector low, Vector high) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8); }
inline Vector widen_low(Vector a) { return _mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)); }
inline Vector widen_high(Vector a) { return _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1)); }
inline Vector zigzag_of_pairs(Vector a, Vector b) {
  const Vector zero = _mm256_setzero_si256(), escape = _mm256_set1_epi16(255);
  const Vector d = _mm256_sub_epi8(b, a);
  const Vector z = _mm256_xor_si256(_mm256_add_epi8(d, d), _mm256_cmpgt_epi8(zero, d));
  const Vector low = _mm256_and_si256(z, escape), high = _mm256_srli_epi16(z, 8);
  const Vector in_low = _mm256_cmpgt_epi16(low, zero);  // -1
  const Vector in_both = _mm256_and_si256(in_low, _mm256_cmpgt_epi16(high, zero));
  const Vector odd = _mm256_add_epi16(_mm256_slli_epi16(_mm256_or_si256(low, high), 1), in_low);
  return _mm256_min_epu16(_mm256_or_si256(odd, in_both), escape);
}
inline Vector undo_zigzag_of_pairs(Vector a, Vector pair) {
  const Vector one = _mm256_set1_epi16(1);
  const Vector size = _mm256_srli_epi16(_mm256_add_epi16(pair, one), 1);
  const Vector in_low = _mm256_cmpeq_epi16(_mm256_and_si256(pair, one), one);
  const Vector z = _mm256_blendv_epi8(_mm256_slli_epi16(size, 8), size, in_low);
  const Vector sign = _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_and_si256(z, _mm256_set1_epi8(1)));
  const Vector half = _mm256_and_si256(_mm256_srli_epi16(z, 1), _mm256_set1_epi8(0x7f));
  return _mm256_add_epi8(a, _mm256_xor_si256(half, sign));
}
inline Vector product_of_low_halves(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
inline void store_lanes(std::uint64_t* p, Vector lanes) { store(p, lanes); }
