// Loops of the difference codec, as one table per instruction set. Holds no code for the reason in
// codec/cpu/kernels.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::lossless {

inline constexpr int kTileValues = 2048;
inline constexpr int kTileBytes = 2 * kTileValues;
inline constexpr int kNumLanes = 4;  // partial sums of a tile's hash

// Keys of the hash, one per 32-bit word of a tile.
struct HashKeys {
  std::uint32_t words[kTileValues / 2];
};
extern const HashKeys kHashKeys;

// Kernel table. Values are bit patterns of 16 bits; `count` is 1 to kTileValues. A tile's size is in units of 4 bytes:
// 0 if no value has changed, (count + 1) / 2 if it holds plain values, else a size between.
struct Kernels {
  // By dtype: bfloat16, float16, byte_pairs.
  //
  // Writes the tile to `wire`, which has room for 2 * count bytes (2 more if count is odd), and `values` to `base`.
  // Returns the tile's size and sets `lanes` to the partial sums of the values' hash.
  int (*encode[3])(const std::byte* values, std::byte* base, int count, std::byte* wire, std::uint64_t* lanes);
  // Inverse: updates `base` from `size` units of `wire`. Returns false and leaves `base` unchanged if no encoder wrote
  // them.
  bool (*decode[3])(const std::byte* wire, int size, std::byte* base, int count, std::uint64_t* lanes);
  // Computes only the partial sums of the values' hash.
  void (*hash)(const std::byte* values, int count, std::uint64_t* lanes);
};

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace zcomm::lossless
