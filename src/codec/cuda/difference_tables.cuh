// What the kernels of lossless differences work on, and what those of a job hand on to each other. The bytes are those
// of docs/wire_format.md, whose names these are.
#pragma once

#include "codec/cuda/tables.cuh"
#include "zcomm/difference.hpp"

namespace zcomm::gpu {

inline constexpr std::uint32_t kTileValues = 2048;
inline constexpr std::uint32_t kTileWarps = 4;  // of a CTA: a tile each
inline constexpr std::uint32_t kTileThreads = 32 * kTileWarps;
// Tiles from one place that is noted in `starts` to the next: two for each lane.
inline constexpr std::uint32_t kStartTiles = 64;

// A type of 16 bits.
struct HalfType {
  std::uint16_t nan;
  std::uint8_t exponent_shift, exponent_mask;
};

// Of a job, in scratch; zeros before its first kernel.
struct DifferenceState {
  std::uint64_t hash;          // of the values: each tile adds its share
  std::uint32_t errors;        // of a message as a whole: bits of DifferenceError
  std::uint32_t has_bad_tile;  // 1 if any is
};

// What the kernels of every job have.
struct DifferenceTiles {
  DifferenceState* state;
  std::uint64_t* starts;  // where tiles kStartTiles * i begin, in words after the table
  std::uint64_t num_elements;
  HalfType type;

  ZCOMM_DEVICE std::uint64_t num_tiles() const { return (num_elements + kTileValues - 1) / kTileValues; }
  ZCOMM_DEVICE std::uint64_t table_words() const { return (num_tiles() + 1) / 2; }
  ZCOMM_DEVICE std::uint32_t count(std::uint64_t tile) const {
    const std::uint64_t rest = num_elements - tile * kTileValues;
    return rest < kTileValues ? static_cast<std::uint32_t>(rest) : kTileValues;
  }
};

struct EncodeDifferencePiece {
  DifferenceTiles tiles;
  const std::byte* values;
  std::byte* base;
  std::byte* message;
  std::uint64_t* hash;
  std::uint64_t* num_bytes;
  std::uint64_t generation;

  ZCOMM_DEVICE bool is_whole() const { return generation == 0 || message == nullptr; }
};

struct DecodeDifferencePiece {
  DifferenceTiles tiles;
  const std::byte* message;
  std::uint64_t num_bytes;
  std::byte* base;
  const std::uint64_t* hash;  // of the base
  std::uint64_t generation;
};

struct HashPiece {
  DifferenceTiles tiles;
  const std::byte* values;
};

// The last step of a decode or check.
struct FinishPiece {
  DifferenceTiles tiles;
  std::byte* values;
  const std::uint64_t* expected;  // hash; null if there are errors already
  std::uint64_t* hash;            // gets that of the values; null: stays as it is
  std::uint32_t* status;
  std::uint32_t error;  // if the hash is another one
};

using EncodeDifferenceTable = Pieces<EncodeDifferencePiece, 48>;
using DecodeDifferenceTable = Pieces<DecodeDifferencePiece, 53>;
using HashTable = Pieces<HashPiece, 92>;
using FinishTable = Pieces<FinishPiece, 53>;
static_assert(sizeof(EncodeDifferenceTable) <= kMaxParameterBytes &&
              sizeof(DecodeDifferenceTable) <= kMaxParameterBytes);
static_assert(sizeof(HashTable) <= kMaxParameterBytes && sizeof(FinishTable) <= kMaxParameterBytes);

}  // namespace zcomm::gpu
