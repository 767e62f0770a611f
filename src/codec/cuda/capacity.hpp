// Pieces of jobs, and wires of sums, that fit the parameters of a launch. Models of time read it without CUDA.
#pragma once

#include <cstddef>

namespace zcomm::gpu {

inline constexpr std::size_t kEncodePieces = 112, kEncodeAnyPieces = 52, kDecodePieces = 76, kCopyPieces = 145;
inline constexpr std::size_t kSumPieces = 32, kSumWires = 88;
inline constexpr std::size_t kSumEncodePieces = 16, kSumEncodeWires = 84;

}  // namespace zcomm::gpu
