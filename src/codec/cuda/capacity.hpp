// Pieces of jobs, and wires of sums, that fit the parameters of a launch. Models of time read it without CUDA.
#pragma once

#include <cstddef>

namespace zcomm::gpu {

struct Capacity {
  std::size_t pieces;
  std::size_t wires = 0;
};
inline constexpr Capacity kEncodeCapacity{112}, kEncodeAnyCapacity{52}, kDecodeCapacity{76}, kCopyCapacity{145};
inline constexpr Capacity kSumCapacity{32, 88}, kSumEncodeCapacity{16, 84};

}  // namespace zcomm::gpu
