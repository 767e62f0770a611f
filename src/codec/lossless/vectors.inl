// Vectors of kWidth bytes, and of kWidth values of 16 bits, for kernels.inl: AVX-512, AVX2, or loops.

#if defined(__AVX512BW__)

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

#elif defined(__AVX2__)

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

#else

constexpr int kWidth = 16;
struct Bytes {
  std::uint8_t at[kWidth];
};
struct Words {
  std::uint16_t at[kWidth];
};
struct Lanes {
  std::uint64_t at[kNumLanes];
};

template <class Function>
inline Bytes for_each_byte(Function&& function) {
  Bytes result;
  for (int i = 0; i < kWidth; ++i) result.at[i] = static_cast<std::uint8_t>(function(i));
  return result;
}

inline Bytes load_bytes(const std::uint8_t* p) {
  Bytes a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store_bytes(std::uint8_t* p, Bytes a) { __builtin_memcpy(p, &a, sizeof a); }
inline Bytes splat(int value) {
  return for_each_byte([&](int) { return value; });
}
inline Bytes add(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] + b.at[i]; });
}
inline Bytes subtract_saturated(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] > b.at[i] ? a.at[i] - b.at[i] : 0; });
}
inline Bytes smaller(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
inline Bytes both(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] & b.at[i]; });
}
inline Bytes without(Bytes a, Bytes b) {
  return for_each_byte([&](int i) { return a.at[i] & ~b.at[i]; });
}
inline bool is_zero(Bytes a) {
  int any = 0;
  for (const std::uint8_t byte : a.at) any |= byte;
  return any == 0;
}
inline std::uint64_t at_least(Bytes a, Bytes b) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint64_t>(a.at[i] >= b.at[i]) << i;
  return bits;
}
// Expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros.
inline Bytes spread(const std::uint64_t* word, int part) {
  return for_each_byte([&](int i) { return (*word >> (part + i) & 1) != 0 ? 255 : 0; });
}
// Extracts bit kBit of each byte.
template <int kBit>
inline std::uint64_t bits_of(Bytes a) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint64_t>(a.at[i] >> kBit & 1) << i;
  return bits;
}
// Returns a * factors / 128; factors are at most 128.
inline Bytes shift_right(Bytes a, Bytes factors) {
  return for_each_byte([&](int i) { return a.at[i] * factors.at[i] >> 7; });
}
// Returns table[index[i]]; the table has 16 entries.
inline Bytes look_up(const std::uint8_t* table, Bytes index) {
  return for_each_byte([&](int i) { return table[index.at[i]]; });
}

using Sums = std::uint32_t;
inline Sums no_sums() { return 0; }
inline Sums add_bytes(Sums sums, Bytes a) {
  for (const std::uint8_t byte : a.at) sums += byte;
  return sums;
}
// Adds ceil(z / 2) * weight.
inline Sums add_weighted_halves(Sums sums, Bytes z, Bytes weight) {
  for (int i = 0; i < kWidth; ++i) sums += (z.at[i] + 1u) / 2 * weight.at[i];
  return sums;
}
inline std::uint32_t total_of(Sums sums) { return sums; }

inline Words load_words(const std::uint16_t* p) {
  Words a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store_words(std::uint16_t* p, Words a) { __builtin_memcpy(p, &a, sizeof a); }
template <int kShift>
inline Bytes fields(Words a, int mask) {
  return for_each_byte([&](int i) { return a.at[i] >> kShift & mask; });
}
// Maps the difference from a to b to a natural number, at most 255.
inline Bytes zigzag(Words a, Words b) {
  return for_each_byte([&](int i) {
    const auto d = static_cast<std::uint16_t>(b.at[i] - a.at[i]);
    const auto z = static_cast<std::uint16_t>(2 * d ^ (d >> 15 != 0 ? 0xffff : 0));
    return z < 255 ? z : 255;
  });
}
inline Words undo_zigzag(Words a, Bytes z) {
  for (int i = 0; i < kWidth; ++i) {
    const int d = z.at[i] >> 1 ^ -(z.at[i] & 1);
    a.at[i] = static_cast<std::uint16_t>(a.at[i] + d);
  }
  return a;
}
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  const auto zigzag_of = [](int from, int to) {
    const auto d = static_cast<std::int8_t>(to - from);
    return static_cast<std::uint8_t>(2 * d ^ (d >> 7));
  };
  return for_each_byte([&](int i) {
    const int low = zigzag_of(a.at[i] & 0xff, b.at[i] & 0xff), high = zigzag_of(a.at[i] >> 8, b.at[i] >> 8);
    const int z = low != 0 ? 2 * low - 1 : 2 * high;
    return z < 255 && (low == 0 || high == 0) ? z : 255;
  });
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  for (int i = 0; i < kWidth; ++i) {
    const int of_byte = (z.at[i] + 1) / 2, d = of_byte >> 1 ^ -(of_byte & 1);
    const int low = (a.at[i] + (z.at[i] % 2 != 0 ? d : 0)) & 0xff, high = (a.at[i] >> 8) + (z.at[i] % 2 != 0 ? 0 : d);
    a.at[i] = static_cast<std::uint16_t>(high << 8 | low);
  }
  return a;
}
inline bool differ(Words a, Words b) { return __builtin_memcmp(&a, &b, sizeof a) != 0; }

inline Lanes no_lanes() { return {}; }
inline Lanes add_products(Lanes lanes, Words a, const std::uint32_t* keys) {
  std::uint32_t words[kWidth / 2];
  __builtin_memcpy(words, &a, sizeof words);
  for (int i = 0; i < kNumLanes; ++i) {
    const std::uint32_t x = words[2 * i] + keys[2 * i];
    const std::uint32_t y = words[2 * i + 1] + keys[2 * i + 1];
    lanes.at[i] += static_cast<std::uint64_t>(x) * y;
  }
  return lanes;
}
inline void store_lanes(std::uint64_t* p, Lanes lanes) { __builtin_memcpy(p, &lanes, sizeof lanes); }

#endif
