// Two variants of reduce_scatter. Their arguments must outlive the stages; there is at least one chunk.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "message.hpp"
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

// Codec jobs that add the residual of error feedback to sums, and update it.
class Residuals {
 public:
  Residuals(const ReducePlan& plan, const Feedback* feedback) : plan_(plan), feedback_(feedback) {}

  // Adds the residual, if there is one, to terms.sum(), piece `index` of a chunk of `owner`'s slot. Adds the encoding
  // of that sum to `jobs`.
  void encode(int owner, std::int64_t chunk, std::size_t index, TermList& terms, DecodeSumEncode job,
              std::vector<DecodeSumEncode>& jobs);

  // Lists the jobs that update residuals after the jobs since begin_chunk: each sum minus its wire.
  void begin_chunk() { updates_.clear(); }
  std::span<const DecodeSumEncode> updates() const { return updates_; }

 private:
  const ReducePlan& plan_;
  const Feedback* feedback_;
  std::vector<DecodeSumEncode> updates_;
};

// Makes one hop to the owners. Each pair of ranks uses the format of its link.
std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const Reduction& reduction);

// Makes two hops. A rank first sums, over its node, the slots of all ranks with its local rank, one per node. Then it
// sends each sum to the node of its owner.
std::unique_ptr<Stages> hierarchical_reduce_scatter(const Resources& resources, const Reduction& reduction);

// Makes the variant that the plan is for.
std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const Reduction& reduction);

}  // namespace zcomm
