// Inputs of the kernels for lossless differences, and the state that the kernels of a job share. docs/wire_format.md
// specifies the bytes and their names.
#pragma once

#include "codec/cuda/tables.cuh"
#include "zcomm/lossless.hpp"

namespace zcomm::gpu {

inline constexpr std::uint32_t kTileValues = 2048;
inline constexpr std::uint32_t kTileWarps = 4;  // per CTA, one tile each
inline constexpr std::uint32_t kTileThreads = 32 * kTileWarps;
// Tiles between two places noted in `starts`: two for each lane.
inline constexpr std::uint32_t kStartTiles = 64;

// Bit layout of a 16-bit type. Byte pairs have kPairExponent for all.
struct HalfType {
  std::uint16_t nan;
  std::uint8_t exponent_shift, exponent_mask;

  ZCOMM_DEVICE bool is_pair() const { return exponent_mask == 0; }
};
inline constexpr std::uint32_t kPairExponent = 8;

// State of a job, in scratch; zeroed before its first kernel.
struct LosslessState {
  std::uint64_t hash;          // of the values: each tile adds its share
  std::uint32_t errors;        // of a message as a whole: bits of LosslessError
  std::uint32_t has_bad_tile;  // 1 if any is
};

// Tiles of a job, in every kernel.
struct LosslessTiles {
  LosslessState* state;
  std::uint64_t* starts;  // starts of tiles kStartTiles * i, in words after the table
  std::uint64_t num_elements;
  HalfType type;

  ZCOMM_DEVICE std::uint64_t num_tiles() const { return (num_elements + kTileValues - 1) / kTileValues; }
  ZCOMM_DEVICE std::uint64_t table_words() const { return (num_tiles() + 1) / 2; }
  ZCOMM_DEVICE std::uint32_t count(std::uint64_t tile) const {
    const std::uint64_t rest = num_elements - tile * kTileValues;
    return rest < kTileValues ? static_cast<std::uint32_t>(rest) : kTileValues;
  }
};

struct EncodeLosslessPiece {
  LosslessTiles tiles;
  const std::byte* values;
  std::byte* base;
  std::byte* message;
  std::uint64_t* hash;
  std::uint64_t* num_bytes;
  std::uint64_t generation;

  ZCOMM_DEVICE bool is_whole() const { return generation == 0 || message == nullptr; }
};

struct DecodeLosslessPiece {
  LosslessTiles tiles;
  const std::byte* message;
  std::uint64_t num_bytes;
  std::byte* base;
  const std::uint64_t* hash;  // of the base
  std::uint64_t generation;
};

struct HashPiece {
  LosslessTiles tiles;
  const std::byte* values;
};

// Last step of a decode or check.
struct FinishPiece {
  LosslessTiles tiles;
  std::byte* spoiled;  // becomes NaN on an error
  std::uint64_t num_spoiled;
  const std::uint64_t* expected;  // hash; null: any, or there are errors already
  std::uint64_t* hash;            // receives the hash of the values; null: unchanged
  std::uint32_t* status;
  std::uint32_t error;  // reported if the hash differs
};

using EncodeLosslessTable = Pieces<EncodeLosslessPiece, 48>;
using DecodeLosslessTable = Pieces<DecodeLosslessPiece, 53>;
using HashTable = Pieces<HashPiece, 92>;
using FinishTable = Pieces<FinishPiece, 48>;
static_assert(sizeof(EncodeLosslessTable) <= kMaxParameterBytes && sizeof(DecodeLosslessTable) <= kMaxParameterBytes);
static_assert(sizeof(HashTable) <= kMaxParameterBytes && sizeof(FinishTable) <= kMaxParameterBytes);

}  // namespace zcomm::gpu
