// One call of reduce_scatter, and the three ways to carry it out.
#pragma once

#include <span>

#include "zcomm/collectives.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

struct Reduction {
  const ReducePlan& plan;
  std::span<const ConstTensorView> slots;
  TensorView output;
  float factor;
  const Feedback* feedback;

  ConstTensorView values(int slot, const Piece<HopFormats>& piece) const {
    return slots[static_cast<std::size_t>(slot)].slice(piece.begin, piece.count);
  }
};

inline Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

// One hop, straight to the owner. Each pair of ranks uses the format of the link between them.
void reduce_scatter_flat(const Resources& resources, const Reduction& reduction);

// Two hops. A rank first sums, over its node, the slots of all ranks that have its local rank, one slot for each node;
// then it sends each of these sums to the node of its owner.
void reduce_scatter_hierarchical(const Resources& resources, const Reduction& reduction);

// One hop of the values as they are, sent from the caller's memory.
void reduce_scatter_direct(const Resources& resources, const Reduction& reduction);

}  // namespace zcomm
