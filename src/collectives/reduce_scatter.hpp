// Two variants of reduce_scatter. Their arguments must outlive the stages; there is at least one chunk.
#pragma once

#include <memory>

#include "pipeline.hpp"
#include "slot_views.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// Arguments of a call of make_reduce_scatter()'s operation.
struct Reduction {
  const ReducePlan& plan;
  std::span<const ConstTensorView> slots;
  TensorView output;
  float factor;
  const Feedback* feedback = nullptr;
  bool read_late = false;  // of `output`, as in DecodeSum

  ConstTensorView values(int slot, const Piece<HopFormats>& piece) const {
    return SlotViews(slots, plan.slots().lengths.size())(slot, piece);
  }
};

inline Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

// Makes one hop to the owners. Each pair of ranks uses the format of its link.
std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const Reduction& reduction);

// Makes two hops. A rank first sums, over its node, the slots of all ranks with its local rank, one per node. Then it
// sends each sum to the node of its owner.
std::unique_ptr<Stages> hierarchical_reduce_scatter(const Resources& resources, const Reduction& reduction);

// Makes the variant that the plan is for.
std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const Reduction& reduction);

}  // namespace zcomm
