// World: a rank, its group's topology and its chunk size. Every plan is made for one.
#pragma once

#include <cstddef>
#include <limits>

#include "zcomm/chunks.hpp"
#include "zcomm/topology.hpp"

namespace zcomm {

// Default size of a chunk, in bytes of values of a shard: large enough for a message to fill its link, small enough for
// the hops and the codec to overlap.
inline constexpr std::size_t kDefaultChunkBytes = std::size_t{1} << 20;

// Returns the default chunk size on GPUs, among `size` ranks: the largest. There a chunk costs a launch of NCCL, as
// long as 20 MiB over NVLink; docs/performance.md has the model.
constexpr std::size_t default_gpu_chunk_bytes(int size) {
  return max_chunk_bytes(size, std::numeric_limits<std::size_t>::max());
}

struct World {
  Topology topology;
  int rank = 0;
  std::size_t chunk_bytes = kDefaultChunkBytes;  // bytes of values, per slot and chunk
};

}  // namespace zcomm
