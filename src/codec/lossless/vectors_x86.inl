// Vectors in AVX-512 or AVX2: what both have in the same form, as operators of the compiler's vectors.

#if defined(__AVX512BW__)
#include "codec/lossless/vectors_avx512.inl"
#else
#include "codec/lossless/vectors_avx2.inl"
#endif

using Bytes = Vector;
using Sums = Vector;
using Lanes = Vector;
struct Words {
  Vector low, high;  // halves
};

using U8 __attribute__((vector_size(kWidth))) = std::uint8_t;
using U16 __attribute__((vector_size(kWidth))) = std::uint16_t;
using I16 __attribute__((vector_size(kWidth))) = std::int16_t;
using U32 __attribute__((vector_size(kWidth))) = std::uint32_t;
using U64 __attribute__((vector_size(kWidth))) = std::uint64_t;

inline Bytes load_bytes(const std::uint8_t* p) { return load(p); }
inline void store_bytes(std::uint8_t* p, Bytes a) { store(p, a); }
inline Bytes splat(int value) { return Bytes(U8{} + static_cast<std::uint8_t>(value)); }
inline Bytes add(Bytes a, Bytes b) { return Bytes(U8(a) + U8(b)); }
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

inline Words load_words(const std::uint16_t* p) { return {load(p), load(p + kWidth / 2)}; }
inline void store_words(std::uint16_t* p, Words a) {
  store(p, a.low);
  store(p + kWidth / 2, a.high);
}
template <int kShift>
inline Bytes fields(Words a, int mask) {
  const auto ones = static_cast<std::uint16_t>(mask);
  return narrow(Vector((U16(a.low) >> kShift) & ones), Vector((U16(a.high) >> kShift) & ones));
}
inline Vector zigzag(Vector a, Vector b) {
  const U16 d = U16(b) - U16(a);
  return smaller_words(Vector((d + d) ^ U16(I16(d) >> 15)), Vector(U16{} + 255));
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
// Maps a change of one byte of a pair to a natural number, odd for the low byte; 255: both changed, or one by far.
inline Bytes zigzag_of_pairs(Words a, Words b) {
  return narrow(zigzag_of_pairs(a.low, b.low), zigzag_of_pairs(a.high, b.high));
}
inline Words undo_zigzag_of_pairs(Words a, Bytes z) {
  return {undo_zigzag_of_pairs(a.low, widen_low(z)), undo_zigzag_of_pairs(a.high, widen_high(z))};
}
inline bool differ(Words a, Words b) { return !is_zero((a.low ^ b.low) | (a.high ^ b.high)); }

inline Lanes no_lanes() { return Lanes{}; }
inline U64 products(Vector words, const std::uint32_t* keys) {
  const U32 x = U32(words) + U32(load(keys));
  return U64(product_of_low_halves(Vector(x), Vector(U64(x) >> 32)));
}
inline Lanes add_products(Lanes lanes, Words a, const std::uint32_t* keys) {
  return Lanes(U64(lanes) + products(a.low, keys) + products(a.high, keys + kWidth / 4));
}
