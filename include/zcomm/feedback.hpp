// Error feedback: adds the error of an encoding to the next one, so that values are late but not lost.
//
// Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv 1901.09847); with a compressed residual, LoCo (arXiv
// 2407.04480).
#pragma once

#include <cstddef>

#include "zcomm/block_format.hpp"

namespace zcomm {

// Error feedback of a reduce_scatter that is called repeatedly with the same lengths, dtype, segments and factor. The
// residual covers the values that this rank encodes for other nodes: with two hops its sums over its node, with one the
// slots of their ranks. In a single node it covers all values that this rank encodes. Exact parts have no residual.
struct Feedback {
  std::byte* residual = nullptr;               // ReducePlan::residual_bytes(), aligned to kWireAlignment
  BlockFormat format{ElementKind::int8, 128};  // of the residual: any lossy one, rounded to nearest
  float decay = 1.0f;                          // factor of the residual in each call, 0 to 1
  bool empty = false;                          // the residual has no values yet, and is only written
};

}  // namespace zcomm
