// Hash of 16-bit values: NH (Black et al., UMAC, CRYPTO 1999) of each tile in four sums, and a tile's share of the
// whole.
#pragma once

#include "codec/cuda/lossless_bits.cuh"
#include "codec/cuda/lossless_tables.cuh"
#include "codec/cuda/memory.cuh"

namespace zcomm::gpu {

inline constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
inline constexpr std::uint32_t kHashSums = 4;
inline constexpr std::uint32_t kGroupWords = kGroup / 2;

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

// Hash of a warp's tile.
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

}  // namespace zcomm::gpu
