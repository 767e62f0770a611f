// Loops of the difference codec. Included once per instruction set, by a file that defines ZCOMM_LOSSLESS_KERNELS,
// the name of its table. kernels.hpp says why nothing here may have external linkage or come from a header.
// docs/wire_format.md specifies the code and its names.
#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "codec/lossless/kernels.hpp"

namespace zcomm::lossless {
namespace {

#include "codec/lossless/bits.inl"
#include "codec/lossless/vectors.inl"

constexpr int kBlock = 64;  // values
constexpr int kBlocks = kTileValues / kBlock;
constexpr int kPlanes = 6;
constexpr std::uint16_t kPadding = 0x7f80;  // fills up a short tile
// Largest size of a coded tile before it is known to be shorter than its values: all sections at their longest, and the
// bytes that BitWriter writes past them.
constexpr int kMostCodedBytes = 8192;

struct Bfloat16 {
  static constexpr int kShift = 7, kMask = 0xff;  // of the exponent
};
struct Float16 {
  static constexpr int kShift = 10, kMask = 0x1f;
};

struct Tables {
  std::uint8_t fields[16] = {};                              // mask of the k low bits: 2^k - 1
  std::uint8_t factors[16] = {128, 64, 32, 16, 8, 4, 2, 1};  // by k: 2^(7 - k)
  std::uint8_t planes_of_escape[16] = {0, kPlanes};          // index: whether z is 255
  std::uint8_t weights[16] = {64, 32, 16, 8, 4, 2, 1};       // by how far an exponent is below the dominant one
};
constexpr Tables make_tables() {
  Tables tables;
  for (int k = 0; k < 8; ++k) {
    tables.fields[k] = static_cast<std::uint8_t>((1 << k) - 1);
  }
  return tables;
}
constexpr Tables kTables = make_tables();

// Copies a short tile and pads it.
inline void fill_up(const std::byte* values, int count, std::uint16_t* filled) {
  __builtin_memcpy(filled, values, 2 * static_cast<std::size_t>(count));
  for (int i = count; i < kTileValues; ++i) filled[i] = kPadding;
}

inline void hash_tile(const std::uint16_t* values, std::uint64_t* lanes) {
  Lanes sums = no_lanes();
  const std::uint32_t* keys = kHashKeys.words;
  for (int i = 0; i < kTileValues; i += kWidth) sums = add_products(sums, load_words(values + i), keys + i / 2);
  store_lanes(lanes, sums);
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

const Kernels ZCOMM_LOSSLESS_KERNELS = {encode<Bfloat16>, encode<Float16>, decode<Bfloat16>, decode<Float16>, hash};

}  // namespace zcomm::lossless
