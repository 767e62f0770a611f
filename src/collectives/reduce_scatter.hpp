// The three ways to carry out a reduce_scatter.
#pragma once

#include "zcomm/collectives.hpp"

namespace zcomm {

inline Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

// One hop, straight to the owner. Each pair of ranks uses the format of the link between them.
void reduce_scatter_flat(const Resources& resources, const Reduction& reduction);

// Two hops. A rank first sums, over its node, the slots of all ranks that have its local rank, one slot for each node;
// then it sends each of these sums to the node of its owner.
void reduce_scatter_hierarchical(const Resources& resources, const Reduction& reduction);

// One hop of the values as they are, sent from the caller's memory.
void reduce_scatter_direct(const Resources& resources, const Reduction& reduction);

}  // namespace zcomm
