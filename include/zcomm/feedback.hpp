// Error feedback: what an encoding has lost is added to the next one, so that it is not lost but late.
//
// Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847); with a compressed residual, LoCo (arXiv
// 2407.04480).
#pragma once

#include <cstddef>
#include <span>

#include "zcomm/block_format.hpp"
#include "zcomm/segment.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/topology.hpp"

namespace zcomm {

// Of one reduce_scatter that is called again and again with the same lengths, dtype, segments and factor. The residual
// covers what this rank encodes for other nodes: with two hops, its sums over its node; with one, its slots of their
// ranks. In a single node it covers what this rank encodes at all. Parts that are sent exactly have none.
struct Feedback {
  std::byte* residual = nullptr;               // feedback_bytes() bytes, aligned to kWireAlignment
  BlockFormat format{ElementKind::int8, 128};  // of the residual: anything lossy, rounded to nearest
  float decay = 1.0f;                          // of the residual in each call, from 0 to 1
  bool empty = false;                          // the residual holds nothing yet, and is only written
};

// Bytes of the residual of a reduce_scatter by `rank` of `slots`, of which only lengths and dtype matter.
std::size_t feedback_bytes(const Topology& topology, int rank, std::size_t chunk_bytes,
                           std::span<const ConstTensorView> slots, ReduceSegments segments, BlockFormat format);

}  // namespace zcomm
