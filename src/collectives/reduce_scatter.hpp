// Stages of reductions.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "random_seed.hpp"
#include "stages.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// What both variants of a reduce_scatter share: lists of codec jobs, which all chunks reuse, and error feedback.
class ReduceStages : public Stages {
 public:
  // The plan and what the arguments refer to must outlive the stages; there is at least one chunk. `read_late` of the
  // output: as in DecodeSum.
  ReduceStages(const Resources& r, const ReducePlan& plan, const Arguments& arguments, bool read_late)
      : r_(r),
        plan_(plan),
        dtype_(plan.slots().dtype),
        arguments_(arguments),
        read_late_(read_late),
        inputs_(arguments.inputs, plan.slots().lengths.size()) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 protected:
  static Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

  // Begins a list of sums, which have at most so many terms together: spans of them stay valid.
  void begin_sums(std::size_t most_terms) {
    terms_.clear();
    terms_.reserve(most_terms);
    sums_.clear();
    messages_.clear();
  }
  // Adds the next wire of messages_[message] to the terms.
  void add_term(int message, BlockFormat format, DType dtype, std::int64_t num_elements) {
    const std::byte*& next = messages_[static_cast<std::size_t>(message)];
    terms_.push_back({take_wire(next, format, dtype, num_elements), format, dtype});
  }
  std::span<const Wire> terms_from(std::size_t first) const { return std::span(terms_).subspan(first); }
  // Lists the sum of the terms from `first` on as a piece of the output.
  void list_output(const Piece<HopFormats>& piece, std::size_t first) {
    const TensorView values = arguments_.outputs.front().slice(piece.begin, piece.count);
    sums_.push_back({terms_from(first), arguments_.factor, values, read_late_});
  }
  // Adds the residual, if there is one, to the terms from `first` on, piece `index` of a chunk of `owner`'s slot. Adds
  // the encoding of their sum to `jobs`, and the update of the residual to updates_: the sum minus its wire. Takes up
  // to two more terms.
  void encode_sum(std::size_t first, int owner, std::int64_t chunk, std::size_t index, DecodeSumEncode job,
                  std::vector<DecodeSumEncode>& jobs);

  const Resources& r_;
  const ReducePlan& plan_;
  const DType dtype_;
  const Arguments arguments_;
  const bool read_late_;
  const SlotViews<ConstTensorView> inputs_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<DecodeSum> sums_;
  std::vector<DecodeSumEncode> updates_;    // of residuals
  std::vector<const std::byte*> messages_;  // what is left of each
  std::vector<Wire> terms_;
};

// Makes one hop to the owners. Each pair of ranks uses the format of its link.
std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const ReducePlan& plan,
                                            const Arguments& arguments, bool read_late);

// Makes two hops. A rank first sums, over its node, the slots of all ranks with its local rank, one per node. Then it
// sends each sum to the node of its owner.
std::unique_ptr<Stages> hierarchical_reduce_scatter(const Resources& resources, const ReducePlan& plan,
                                                    const Arguments& arguments, bool read_late);

}  // namespace zcomm
