// Loops of the difference codec. Included once per instruction set, by a file that defines ZCOMM_LOSSLESS_KERNELS,
// the name of its table. kernels.hpp says why nothing here may have external linkage or come from a header.
// docs/wire_format.md specifies the code and its names.
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "codec/lossless/kernels.hpp"

namespace zcomm::lossless {
namespace {

#include "codec/lossless/vectors.inl"

// --- Streams of bits, from the lowest bit of the first byte on

inline int popcount(std::uint64_t bits) { return __builtin_popcountll(bits); }
inline int lowest(std::uint64_t bits) { return __builtin_ctzll(bits); }

#ifdef __BMI2__
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) { return _pext_u64(bits, mask); }
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) { return _pdep_u64(bits, mask); }
#else
// Extracts the bits of `bits` where `mask` has ones, packed from bit 0 on.
inline std::uint64_t gather_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t gathered = 0;
  for (int i = 0; mask != 0; ++i, mask &= mask - 1) gathered |= (bits >> lowest(mask) & 1) << i;
  return gathered;
}
// Inverts gather_bits; ignores further bits.
inline std::uint64_t scatter_bits(std::uint64_t bits, std::uint64_t mask) {
  if (mask == ~std::uint64_t{0}) return bits;
  std::uint64_t scattered = 0;
  for (; mask != 0; mask &= mask - 1, bits >>= 1) scattered |= (bits & 1) << lowest(mask);
  return scattered;
}
#endif

// Appends bits to a buffer. Writes up to 8 bytes past the last bit.
struct BitWriter {
  std::uint8_t* next;
  std::uint64_t held = 0;
  int num_held = 0;  // bits, below 8

  // Appends the lowest `count` bits of `bits`, 0 to 64; the others must be zero.
  void put(std::uint64_t bits, int count) {
    const std::uint64_t first = held | bits << num_held;
    const std::uint64_t second = bits >> 1 >> (63 - num_held);
    __builtin_memcpy(next, &first, 8);
    const int total = num_held + count;
    next += total >> 3;
    held = (total < 64 ? first : second) >> (total & 56);
    num_held = total & 7;
  }
  // Skips to the next byte.
  void align() {
    __builtin_memcpy(next, &held, 8);
    next += num_held != 0;
    held = 0;
    num_held = 0;
  }
};

// Reads bits without a bounds check on each access. Callers ask is_beyond() after each block of values, so at most
// kReadBeyond bytes past the end are read.
constexpr int kReadBeyond = 80;
struct BitReader {
  const std::uint8_t* bytes;
  std::int64_t num_bits;      // available bits
  std::int64_t position = 0;  // in bits

  bool is_beyond() const { return position > num_bits; }
  // Skips to the next byte.
  void align() { position = (position + 7) / 8 * 8; }
  // Returns the next `count` bits, up to 64; higher bits are undefined.
  std::uint64_t take(int count) {
    const std::uint8_t* p = bytes + (position >> 3);
    const int shift = static_cast<int>(position & 7);
    std::uint64_t low;
    __builtin_memcpy(&low, p, 8);
    position += count;
    return low >> shift | static_cast<std::uint64_t>(p[8]) << (63 - shift) << 1;
  }
  // Returns up to 56 bits.
  std::uint64_t take_few(int count) {
    std::uint64_t low;
    __builtin_memcpy(&low, bytes + (position >> 3), 8);
    low >>= position & 7;
    position += count;
    return low;
  }
};

// --- Values

constexpr int kBlock = 64;  // values
constexpr int kBlocks = kTileValues / kBlock;
constexpr int kPlanes = 6;
constexpr std::uint16_t kPadding = 0x7f80;  // fills up a short tile
// Largest size of a coded tile before it is known to be shorter than its values: all sections at their longest, and the
// bytes that BitWriter writes past them.
constexpr int kMostCodedBytes = 8192;

// Kinds of values: the exponent that predicts an update, and updates as natural numbers z up to 255, for an escape.
template <int kShift, int kMask>
struct FloatOf16Bits {
  static constexpr int kExponentOfPadding = kPadding >> kShift& kMask;
  static constexpr int kMostWeighed = 255;  // z that c depends on
  static Bytes exponents(Words a) { return fields<kShift>(a, kMask); }
  static Bytes differences(Words a, Words b) { return zigzag(a, b); }
  static Words successors(Words a, Bytes z) { return undo_zigzag(a, z); }
};
using Bfloat16 = FloatOf16Bits<7, 0xff>;
using Float16 = FloatOf16Bits<10, 0x1f>;

struct BytePair {
  static constexpr int kExponent = 8;  // of all: c tells groups of likely changes from unlikely ones, and k
  static constexpr int kExponentOfPadding = kExponent;
  static constexpr int kMostWeighed = 7;
  static Bytes exponents(Words) { return splat(kExponent); }
  static Bytes differences(Words a, Words b) { return zigzag_of_pairs(a, b); }
  static Words successors(Words a, Bytes z) { return undo_zigzag_of_pairs(a, z); }
};

struct Tables {
  std::uint8_t fields[16] = {0, 1, 3, 7, 15, 31, 63, 127};   // by k: mask of the k low bits, 2^k - 1
  std::uint8_t factors[16] = {128, 64, 32, 16, 8, 4, 2, 1};  // by k: 2^(7 - k)
  std::uint8_t planes_of_escape[16] = {0, kPlanes};          // index: whether z is 255
  std::uint8_t weights[16] = {64, 32, 16, 8, 4, 2, 1};       // by how far an exponent is below the dominant one
};
constexpr Tables kTables;

// Copies a short tile and pads it.
inline void fill_up(const std::byte* values, int count, std::uint16_t* filled) {
  __builtin_memcpy(filled, values, 2 * static_cast<std::size_t>(count));
  for (int i = count; i < kTileValues; ++i) filled[i] = kPadding;
}

inline void hash_tile(const std::uint16_t* values, std::uint64_t* lanes) {
  Words sums = no_lanes();
  const std::uint32_t* keys = kHashKeys.words;
  for (int i = 0; i < kTileValues; i += kWidth) sums = add_products(sums, load_words(values + i), keys + i / 2);
  store_lanes(lanes, sums.low, sums.high);
}

void hash(const std::byte* values, int count, std::uint64_t* lanes) {
  if (count == kTileValues) return hash_tile(reinterpret_cast<const std::uint16_t*>(values), lanes);
  std::uint16_t filled[kTileValues];
  fill_up(values, count, filled);
  hash_tile(filled, lanes);
}

// Returns the first exponent whose values are unlikely to differ; 256 if there is none.
inline int first_unlikely(int c) { return c + 1 < 255 ? c + 2 : 256; }

inline std::uint64_t unlikely_of(Bytes exponents, int first) {
  return first < 256 ? at_least(exponents, splat(first)) : 0;
}
// Returns k of each value.
inline Bytes widths(Bytes exponents, int c) { return smaller(subtract_saturated(splat(c), exponents), splat(7)); }

// Sets the highest bit of each byte that is not zero.
inline std::uint64_t nonzero_bytes(std::uint64_t x) {
  constexpr std::uint64_t kRest = 0x7f7f7f7f7f7f7f7f;
  return (((x & kRest) + kRest) | x) & ~kRest;
}
// Returns a mask of the groups of 8, among `count` bits, that `flags` names.
inline std::uint64_t bits_of_groups(std::uint64_t flags, int count) {
  const std::uint64_t groups = scatter_bits(flags, 0x0101010101010101) * 255;
  return count < 64 ? groups & ((std::uint64_t{1} << count) - 1) : groups;
}

// Layout of a tile's code, found before any value is coded: one bit per value in each block.
struct Shape {
  std::uint64_t unlikely[kBlocks];
  std::uint64_t planes[kPlanes][kBlocks];
  alignas(64) std::uint8_t fields[kTileValues];  // bits of z that are sent literally: 2^k - 1
  // Masks of blocks: with literal bits, with a value in plane 0, with an escape.
  std::uint32_t with_fields = 0, touched = 0, with_escapes = 0;
};

#include "codec/lossless/decode.inl"
#include "codec/lossless/encode.inl"

}  // namespace

const Kernels ZCOMM_LOSSLESS_KERNELS = {
    {encode<Bfloat16>, encode<Float16>, encode<BytePair>}, {decode<Bfloat16>, decode<Float16>, decode<BytePair>}, hash};

}  // namespace zcomm::lossless
