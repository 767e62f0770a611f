// The three ways to carry out a reduce_scatter. What they refer to must outlive their stages; at least one chunk.
#pragma once

#include <memory>

#include "pipeline.hpp"

namespace zcomm {

inline Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

// One hop, straight to the owner. Each pair of ranks uses the format of the link between them.
std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const Reduction& reduction);

// Two hops. A rank first sums, over its node, the slots of all ranks that have its local rank, one slot for each node;
// then it sends each of these sums to the node of its owner.
std::unique_ptr<Stages> hierarchical_reduce_scatter(const Resources& resources, const Reduction& reduction);

// One hop of the values as they are, sent from the caller's memory.
std::unique_ptr<Stages> direct_reduce_scatter(const Resources& resources, const Reduction& reduction);

// The one of these that the plan is for.
std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const Reduction& reduction);

}  // namespace zcomm
