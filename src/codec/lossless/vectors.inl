// Vectors of kWidth bytes, and of kWidth values of 16 bits, for kernels.inl. First what the instruction sets have in
// different forms, then operators of the compiler's vectors.

#if defined(__AVX512BW__)
constexpr int kWidth = 64;
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
using Vector __attribute__((vector_size(kWidth))) = long long;
using U8 __attribute__((vector_size(kWidth))) = std::uint8_t;
using I8 __attribute__((vector_size(kWidth))) = std::int8_t;
using U16 __attribute__((vector_size(kWidth))) = std::uint16_t;
using I16 __attribute__((vector_size(kWidth))) = std::int16_t;
using U32 __attribute__((vector_size(kWidth))) = std::uint32_t;
using U64 __attribute__((vector_size(kWidth))) = std::uint64_t;

using Bytes = Vector;
using Sums = Vector;
struct Words {
  Vector low, high;  // halves
};

inline Vector load(const void* p) {
  Vector a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store(void* p, Vector a) { __builtin_memcpy(p, &a, sizeof a); }

// Each instruction set has
//   spread             expands the next bits of a 64-bit word, from bit `part` on, to bytes of ones or zeros
//   bits_of            extracts bit kBit of each byte
//   look_up            returns table[index[i]]; the table has 16 entries
//   sums_of_bytes      sums in 32-bit lanes; sums_of_halves: of ceil(z / 2) * weight, weights are below 128
//   narrow             narrows numbers of at most 255 to bytes; widen_low and widen_high are the inverse
//   store_lanes        stores the kNumLanes sums of add_products
#if defined(__AVX512BW__)

inline Vector subtract_saturated(Vector a, Vector b) { return _mm512_subs_epu8(a, b); }
inline bool is_zero(Vector a) { return _mm512_test_epi8_mask(a, a) == 0; }
inline std::uint64_t at_least(Vector a, Vector b) { return _mm512_cmpge_epu8_mask(a, b); }
inline Vector spread(const std::uint64_t* word, int) { return _mm512_movm_epi8(*word); }
template <int kBit>
inline std::uint64_t bits_of(Vector a) {
  return _mm512_movepi8_mask(_mm512_slli_epi16(a, 7 - kBit));
}
inline Vector look_up(const std::uint8_t* table, Vector index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
inline Vector sums_of_bytes(Vector a) { return _mm512_sad_epu8(a, _mm512_setzero_si512()); }
inline Vector sums_of_halves(Vector z, Vector weight) {
  const Vector pairs = _mm512_maddubs_epi16(_mm512_avg_epu8(z, _mm512_setzero_si512()), weight);
  return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
inline Vector narrow(Vector low, Vector high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
}
inline Vector widen_low(Vector a) { return _mm512_cvtepu8_epi16(_mm512_castsi512_si256(a)); }
inline Vector widen_high(Vector a) { return _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(a, 1)); }
inline Vector product_of_low_halves(Vector a, Vector b) { return _mm512_mul_epu32(a, b); }
inline void store_lanes(std::uint64_t* p, Vector low, Vector high) {
  const Vector lanes = _mm512_add_epi64(low, high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_add_epi64(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
}

#elif defined(__AVX2__)

inline Vector subtract_saturated(Vector a, Vector b) { return _mm256_subs_epu8(a, b); }
inline bool is_zero(Vector a) { return _mm256_testz_si256(a, a) != 0; }
inline std::uint64_t at_least(Vector a, Vector b) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(a, b), a)));
}
inline Vector spread(const std::uint64_t* word, int part) {
  int bits;
  __builtin_memcpy(&bits, reinterpret_cast<const char*>(word) + part / 8, 4);
  const Vector byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const Vector bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const Vector bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}
template <int kBit>
inline std::uint64_t bits_of(Vector a) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(a, 7 - kBit)));
}
inline Vector look_up(const std::uint8_t* table, Vector index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index);
}
inline Vector sums_of_bytes(Vector a) { return _mm256_sad_epu8(a, _mm256_setzero_si256()); }
inline Vector sums_of_halves(Vector z, Vector weight) {
  const Vector pairs = _mm256_maddubs_epi16(_mm256_avg_epu8(z, _mm256_setzero_si256()), weight);
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Vector narrow(Vector low, Vector high) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8); }
inline Vector widen_low(Vector a) { return _mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)); }
inline Vector widen_high(Vector a) { return _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1)); }
inline Vector product_of_low_halves(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
inline void store_lanes(std::uint64_t* p, Vector low, Vector high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_add_epi64(low, high));
}

#else

inline Vector subtract_saturated(Vector a, Vector b) { return Vector(U8(a) > U8(b) ? U8(a) - U8(b) : U8{}); }
inline bool is_zero(Vector a) { return (a[0] | a[1]) == 0; }
inline Vector spread(const std::uint64_t* word, int part) {
  constexpr std::uint64_t kEachByte = 0x0101010101010101, kBitOfByte = 0x8040201008040201;
  const std::uint64_t bits = *word >> part;
  const U64 bytes = {(bits & 0xff) * kEachByte, (bits >> 8 & 0xff) * kEachByte}, bit_of = U64{} + kBitOfByte;
  return Vector(U8(bytes & bit_of) == U8(bit_of));
}
template <int kBit>
inline std::uint64_t bits_of(Vector a) {
  const U64 ones = (U64(a) >> kBit) & 0x0101010101010101;
  return ones[0] * 0x0102040810204080 >> 56 | (ones[1] * 0x0102040810204080 >> 56) << 8;
}
inline std::uint64_t at_least(Vector a, Vector b) { return bits_of<0>(Vector(U8(a) >= U8(b))); }
inline Vector look_up(const std::uint8_t* table, Vector index) {
  std::uint8_t bytes[kWidth];
  store(bytes, index);
  for (std::uint8_t& byte : bytes) byte = table[byte];
  return load(bytes);
}
inline Vector sums_of_pairs(U16 pairs) { return Vector((U32(pairs) & 0xffff) + (U32(pairs) >> 16)); }
inline Vector sums_of_bytes(Vector a) { return sums_of_pairs((U16(a) & 0xff) + (U16(a) >> 8)); }
inline Vector sums_of_halves(Vector z, Vector weight) {
  const U16 even = ((U16(z) & 0xff) + 1) >> 1, odd = ((U16(z) >> 8) + 1) >> 1;
  return sums_of_pairs(even * (U16(weight) & 0xff) + odd * (U16(weight) >> 8));
}
inline Vector narrow(Vector low, Vector high) {
  return Vector(__builtin_shufflevector(U8(low), U8(high), 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
}
inline Vector widen_low(Vector a) {
  return Vector(__builtin_shufflevector(U8(a), U8{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
}
inline Vector widen_high(Vector a) {
  return Vector(__builtin_shufflevector(U8(a), U8{}, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}
inline Vector product_of_low_halves(Vector a, Vector b) {
#ifdef __SSE2__
  return _mm_mul_epu32(a, b);
#else
  return Vector((U64(a) & 0xffffffff) * (U64(b) & 0xffffffff));
#endif
}
inline void store_lanes(std::uint64_t* p, Vector low, Vector high) {
  store(p, low);
  store(p + 2, high);
}

#endif

inline Bytes splat(int value) { return Bytes(U8{} + static_cast<std::uint8_t>(value)); }
inline Bytes add(Bytes a, Bytes b) { return Bytes(U8(a) + U8(b)); }
inline Bytes smaller(Bytes a, Bytes b) { return Bytes(U8(a) > U8(b) ? U8(b) : U8(a)); }
inline Bytes both(Bytes a, Bytes b) { return a & b; }
inline Bytes without(Bytes a, Bytes b) { return a & ~b; }
// Returns a * factors / 128; factors are at most 128.
inline Bytes shift_right(Bytes a, Bytes factors) {
  const U16 even = (U16(a) & 0xff) * (U16(factors) & 0xff);
  const U16 odd = (U16(a) >> 8) * (U16(factors) >> 8);
  return Bytes((even >> 7) | ((odd >> 7) << 8));  // no mask: AVX2 has few registers
}

inline Sums no_sums() { return Sums{}; }
inline Sums add_bytes(Sums sums, Bytes a) { return Sums(U32(sums) + U32(sums_of_bytes(a))); }
// Adds ceil(z / 2) * weight; weights are below 128.
inline Sums add_weighted_halves(Sums sums, Bytes z, Bytes weight) {
  return Sums(U32(sums) + U32(sums_of_halves(z, weight)));
}
inline std::uint32_t total_of(Sums sums) {
  std::uint32_t parts[kWidth / 4], total = 0;
  store(parts, sums);
  for (const std::uint32_t part : parts) total += part;
  return total;
}

inline Words load_words(const std::uint16_t* p) { return {load(p), load(p + kWidth / 2)}; }
inline void store_words(std::uint16_t* p, Words a) {
  store(p, a.low);
  store(p + kWidth / 2, a.high);
}
inline bool differ(Words a, Words b) { return !is_zero((a.low ^ b.low) | (a.high ^ b.high)); }
template <int kShift>
inline Bytes fields(Words a, int mask) {
  const auto ones = static_cast<std::uint16_t>(mask);
  return narrow(Vector((U16(a.low) >> kShift) & ones), Vector((U16(a.high) >> kShift) & ones));
}

inline Vector at_most_255(U16 a) { return Vector(a > 255 ? U16{} + 255 : a); }
inline Vector zigzag(Vector a, Vector b) {
  const U16 d = U16(b) - U16(a);
  return at_most_255((d + d) ^ U16(I16(d) >> 15));
}
// Maps the difference from a to b to a natural number, at most 255.
inline Bytes zigzag(Words a, Words b) { return narrow(zigzag(a.low, b.low), zigzag(a.high, b.high)); }
inline Vector undo_zigzag(Vector a, Vector of_words) {
  const U16 z = U16(of_words);
  return Vector(U16(a) + ((z >> 1) ^ -(z & 1)));
}
inline Words undo_zigzag(Words a, Bytes z) {
  return {undo_zigzag(a.low, widen_low(z)), undo_zigzag(a.high, widen_high(z))};
}

inline Vector zigzag_of_pairs(Vector a, Vector b) {
  const U8 d = U8(b) - U8(a);
  const U16 z = U16((d + d) ^ U8(I8(d) < 0));
  const U16 low = z & 255, high = z >> 8;
  const U16 in_low = U16(I16(low) > 0), in_both = in_low & U16(I16(high) > 0);
  return at_most_255((((low | high) << 1) + in_low) | in_both);
}
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  return narrow(zigzag_of_pairs(a.low, b.low), zigzag_of_pairs(a.high, b.high));
}
inline Vector undo_zigzag_of_pairs(Vector a, Vector of_words) {
  const U16 pair = U16(of_words), size = (pair + 1) >> 1;
  const U8 z = U8((pair & 1) == 1 ? size : size << 8);
  return Vector(U8(a) + ((z >> 1) ^ -(z & 1)));
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  return {undo_zigzag_of_pairs(a.low, widen_low(z)), undo_zigzag_of_pairs(a.high, widen_high(z))};
}

// Sums of products that store_lanes() brings to kNumLanes.
inline Words no_lanes() { return {Vector{}, Vector{}}; }
inline Vector add_products(Vector lanes, Vector words, const std::uint32_t* keys) {
  const U32 x = U32(words) + U32(load(keys));
  return Vector(U64(lanes) + U64(product_of_low_halves(Vector(x), Vector(U64(x) >> 32))));
}
inline Words add_products(Words lanes, Words a, const std::uint32_t* keys) {
  return {add_products(lanes.low, a.low, keys), add_products(lanes.high, a.high, keys + kWidth / 4)};
}
