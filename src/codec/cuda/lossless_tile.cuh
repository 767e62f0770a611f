// Inputs of the kernels for lossless differences, and the tile of a warp: each lane first loads groups of 16 values in
// memory order, then owns a block of 64. docs/wire_format.md specifies the bytes and their names.
#pragma once

#include "codec/cuda/lossless_bits.cuh"
#include "codec/cuda/memory.cuh"
#include "codec/cuda/tables.cuh"
#include "zcomm/lossless.hpp"

namespace zcomm::gpu {

inline constexpr std::uint32_t kTileValues = 2048;
inline constexpr std::uint32_t kTileWarps = 4;  // per CTA, one tile each
inline constexpr std::uint32_t kTileThreads = 32 * kTileWarps;
// Tiles between two of starts(): two for each lane.
inline constexpr std::uint32_t kStartTiles = 64;
inline constexpr std::uint32_t kTileGroups = kTileValues / kGroup;
inline constexpr std::uint32_t kGroupWords = kGroup / 2;
inline constexpr std::uint32_t kBlockWords = 32;    // a word has two values
inline constexpr std::uint32_t kPadding = 0x7f80u;  // fills up a short tile
inline constexpr std::uint32_t kHeadBits = 64;      // of a coded tile, ahead of its sections
inline constexpr std::uint32_t kEscape = 6;         // value of r
inline constexpr std::uint32_t kPairExponent = 8;   // of all byte pairs

// First 8 bytes of a header: "ZD16", version 1, the kind, zeros.
inline constexpr std::uint64_t kHeaderStart = 0x13631445au;
inline constexpr std::uint32_t kKindShift = 40;
inline constexpr std::uint32_t kHeaderWords = kLosslessHeaderBytes / 4;

// --- Inputs of the kernels

// State of a job, in scratch; zeroed before its first kernel. The starts of tiles follow it.
struct LosslessState {
  std::uint64_t hash;          // of the values: each tile adds its share
  std::uint32_t errors;        // of a message as a whole: bits of LosslessError
  std::uint32_t has_bad_tile;  // 1 if any is
};

// Values of a job, in every kernel: the base of an encode or decode, which becomes the values.
struct LosslessPiece {
  LosslessState* state;
  std::byte* base;
  std::uint64_t num_elements;
  DType dtype;

  ZCOMM_DEVICE std::uint64_t num_tiles() const { return (num_elements + kTileValues - 1) / kTileValues; }
  ZCOMM_DEVICE std::uint64_t table_words() const { return (num_tiles() + 1) / 2; }
  ZCOMM_DEVICE std::uint32_t count(std::uint64_t tile) const {
    const std::uint64_t rest = num_elements - tile * kTileValues;
    return rest < kTileValues ? static_cast<std::uint32_t>(rest) : kTileValues;
  }
  // Returns the starts of tiles kStartTiles * i, in words after the table.
  ZCOMM_DEVICE std::uint64_t* starts() const { return reinterpret_cast<std::uint64_t*>(state + 1); }
};

struct EncodeLosslessPiece : LosslessPiece {
  const std::byte* values;
  std::byte* message;
  std::uint64_t* hash;
  std::uint64_t* num_bytes;
  std::uint64_t generation;

  ZCOMM_DEVICE bool is_whole() const { return generation == 0 || message == nullptr; }
};

struct DecodeLosslessPiece : LosslessPiece {
  const std::byte* message;
  std::uint64_t num_bytes;
  const std::uint64_t* hash;  // of the base
  std::uint64_t generation;
};

// Last step of a decode or check.
struct FinishPiece : LosslessPiece {
  std::byte* spoiled;  // becomes NaN on an error
  std::uint64_t num_spoiled;
  const std::uint64_t* expected;  // hash; null: any, or there are errors already
  std::uint64_t* hash;            // receives the hash of the values; null: unchanged
  std::uint32_t* status;
  std::uint32_t error;  // reported if the hash differs
  std::uint16_t nan;
};

using EncodeLosslessTable = Pieces<EncodeLosslessPiece, 48>;
using DecodeLosslessTable = Pieces<DecodeLosslessPiece, 53>;
using HashTable = Pieces<LosslessPiece, 92>;
using FinishTable = Pieces<FinishPiece, 48>;

// --- A tile

// Shared memory for 16 bits of each value of a tile. The rows of lanes begin in different banks.
struct Rows {
  ZCOMM_DEVICE std::uint32_t* group(std::uint32_t group) {
    return words + group / 4 * (kBlockWords + 1) + group % 4 * kGroupWords;
  }
  ZCOMM_DEVICE void put(std::uint32_t index, const std::uint32_t (&values)[kGroupWords]) {
#pragma unroll
    for (std::uint32_t i = 0; i < kGroupWords; ++i) group(index)[i] = values[i];
  }
  ZCOMM_DEVICE std::uint32_t* of_lane() { return words + lane_index() * (kBlockWords + 1); }
  ZCOMM_DEVICE const std::uint32_t* of_lane() const { return words + lane_index() * (kBlockWords + 1); }

  std::uint32_t words[32 * (kBlockWords + 1)];
};

// Words of a coded tile, which is shorter than its values, and room for take_bits() to read past it.
inline constexpr std::uint32_t kCodedWords = kTileValues / 2 + 4;

ZCOMM_DEVICE std::uint64_t tile_of_warp(std::uint32_t first_cta) {
  return static_cast<std::uint64_t>(blockIdx.x - first_cta) * kTileWarps + threadIdx.x / 32;
}

// Pads a group from value `count` of the tile on.
ZCOMM_DEVICE void fill_up(std::uint32_t group, std::uint32_t count, std::uint32_t (&words)[kGroupWords]) {
  if ((group + 1) * kGroup <= count) return;
#pragma unroll
  for (std::uint32_t i = 0; i < kGroupWords; ++i) {
    const std::uint32_t begin = group * kGroup + 2 * i;
    if (begin + 1 >= count) words[i] = (words[i] & 0xffffu) | kPadding << 16;
    if (begin >= count) words[i] = (words[i] & 0xffff0000u) | kPadding;
  }
}
ZCOMM_DEVICE void load_filled(const std::byte* tile, std::uint32_t group, std::uint32_t count,
                              std::uint32_t (&words)[kGroupWords]) {
  load_group<Bfloat16>(tile, group * kGroup, count, words);  // or float16: only bits are moved
  fill_up(group, count, words);
}

// Counts the elements in the groups of 8 that `flags` names, among `count`; the last group may be short.
ZCOMM_DEVICE std::uint32_t bits_of_groups(std::uint32_t flags, std::uint32_t count) {
  const bool has_short_one = (flags >> (count / 8) & 1u) != 0;
  return 8 * popcount(flags) - (has_short_one ? 8 - count % 8 : 0);
}

// --- Hash

inline constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
inline constexpr std::uint32_t kHashSums = 4;

// Finalizer of splitmix64 (Steele et al., OOPSLA 2014).
constexpr __host__ __device__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Keys, one per word of a tile.
struct HashKeys {
  alignas(16) std::uint32_t words[kTileValues / 2];
};
constexpr HashKeys make_hash_keys() {
  HashKeys keys{};
  for (std::uint32_t i = 0; i < kTileValues / 2; ++i)
    keys.words[i] = static_cast<std::uint32_t>(mix((i + 1) * kGolden) >> 32);
  return keys;
}
static __device__ constexpr HashKeys kHashKeys = make_hash_keys();

// NH (Black et al., UMAC, CRYPTO 1999) of a warp's tile in four sums, and its share of the whole hash.
class TileHash {
 public:
  // Adds group `group` of the tile, 16 values: four pairs of words, one for each sum.
  ZCOMM_DEVICE void add(const std::uint32_t (&words)[kGroupWords], std::uint32_t group) {
    std::uint32_t keys[kGroupWords];
    load_words(reinterpret_cast<const std::byte*>(kHashKeys.words + group * kGroupWords), keys);
#pragma unroll
    for (std::uint32_t i = 0; i < kHashSums; ++i) {
      const std::uint32_t first = words[2 * i] + keys[2 * i], second = words[2 * i + 1] + keys[2 * i + 1];
      sums_[i] += static_cast<std::uint64_t>(first) * second;
    }
  }
  // Adds the tile to the hash, after the last group of all lanes. Called by all lanes.
  ZCOMM_DEVICE void add_to(LosslessState* state, std::uint64_t tile) {
    std::uint64_t hash = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kHashSums; ++i) {
      hash += mix(sum_of_lanes(sums_[i]) + (kHashSums * tile + i + 1) * kGolden);
    }
    if (lane_index() == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&state->hash), static_cast<unsigned long long>(hash));
    }
  }

 private:
  std::uint64_t sums_[kHashSums] = {};
};

// --- Places of tiles in a message

ZCOMM_DEVICE std::uint32_t* table_of(std::byte* message) {
  return reinterpret_cast<std::uint32_t*>(message) + kHeaderWords;
}
ZCOMM_DEVICE const std::uint32_t* table_of(const std::byte* message) {
  return reinterpret_cast<const std::uint32_t*>(message) + kHeaderWords;
}
ZCOMM_DEVICE std::uint32_t size_of(const std::uint32_t* table, std::uint64_t tile) {
  return table[tile / 2] >> (tile % 2 * 16) & 0xffffu;
}

// Sums two entries of the table; entries of tiles from `end` on count as 0.
ZCOMM_DEVICE std::uint32_t sum_of_sizes(const std::uint32_t* table, std::uint64_t pair, std::uint64_t end) {
  if (2 * pair >= end) return 0;
  const std::uint32_t sizes = table[pair];
  return (sizes & 0xffffu) + (2 * pair + 1 < end ? sizes >> 16 : 0);
}

// Returns where a tile begins, in words after the table. Called by all lanes.
ZCOMM_DEVICE std::uint64_t start_of(const LosslessPiece& piece, const std::uint32_t* table, std::uint64_t tile) {
  const std::uint64_t first = tile / kStartTiles;
  const std::uint32_t sizes = sum_of_sizes(table, first * (kStartTiles / 2) + lane_index(), tile);
  return piece.starts()[first] + sum_of_lanes(sizes);
}

using WarpSums = std::uint32_t[kThreads / 32];

// Starts that a warp computes per round of scan_sizes(). Their loads are in flight together: latency bounds a round.
inline constexpr std::uint32_t kScanStarts = 8;

// Notes in starts() where tiles begin; returns the words of all tiles. Called by all threads of a CTA of kThreads.
ZCOMM_DEVICE std::uint64_t scan_sizes(const LosslessPiece& piece, const std::uint32_t* table, WarpSums& sums) {
  constexpr std::uint32_t kWarps = kThreads / 32;
  const std::uint64_t num_tiles = piece.num_tiles();
  const std::uint32_t warp = threadIdx.x / 32;
  std::uint64_t total = 0;
#pragma unroll 1
  for (std::uint64_t first = 0; first * kStartTiles < num_tiles; first += kWarps * kScanStarts) {
    const std::uint64_t start = first + warp * kScanStarts;
    std::uint32_t own[kScanStarts], sum = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kScanStarts; ++i) {
      own[i] = sum_of_sizes(table, (start + i) * (kStartTiles / 2) + lane_index(), num_tiles);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kScanStarts; ++i) sum += own[i] = sum_of_lanes(own[i]);
    if (lane_index() == 0) sums[warp] = sum;
    __syncthreads();
    std::uint64_t before = total;
#pragma unroll
    for (std::uint32_t i = 0; i < kWarps; ++i) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kScanStarts; ++i) {
      if (lane_index() == 0 && (start + i) * kStartTiles < num_tiles) piece.starts()[start + i] = before;
      before += own[i];
    }
    __syncthreads();
  }
  return total;
}

}  // namespace zcomm::gpu
