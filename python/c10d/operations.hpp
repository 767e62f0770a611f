// Operations that their callers hold, for repeated calls with options per tensor: parts that are sent exactly, wires or
// values kept in the node (hpZ of ZeRO++, arXiv 2306.10209), error feedback, and separate counters. A call equal to the
// one before plans nothing.
#pragma once

#include <tuple>
#include <variant>

#include "compressed_calls.hpp"

namespace zcomm::c10d_binding {

// Pairs of a number of elements of a shard and whether they are sent exactly. Empty: the policy's format applies to
// all.
using Parts = std::vector<std::pair<std::int64_t, bool>>;

class Operations;

// Gathered, scattered or reduced tensor: one, or one for each part, each with the parts of all ranks in rank order.
// Also a rank's own shard that is gathered: one tensor, or one for each part.
using Whole = std::vector<at::Tensor>;

// Operation, and the tensors that it was planned for.
struct PlannedOperation {
  c10::weak_intrusive_ptr<::c10d::Backend> group;  // keeps `owner` valid
  Operations* owner;
  Collective collective;
  HopFormats format;  // of the parts that are not exact
  at::DeviceType device;
  at::ScalarType dtype;
  std::int64_t num_elements;  // of the gathered, scattered or reduced tensor
  Parts parts;
  std::optional<BlockFormat> feedback;
  bool in_one_hop;
  OperationPtr operation;
  std::shared_ptr<TensorKept> kept;
};
using PlannedPtr = std::shared_ptr<PlannedOperation>;
// A planned operation, or why the call stays exact.
using PlanOrVerdict = std::variant<PlannedPtr, Verdict>;

// Residual in the planned format: uint8 [residual_bytes of the operation] on the device of the call, its decay, and
// whether it is empty.
using Residual = std::tuple<at::Tensor, float, bool>;

class Operations {
 public:
  // Borrows all arguments.
  Operations(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, CompressedCalls& compressed)
      : group_(group), options_(std::move(options)), compressed_(compressed) {}

  // A call stays exact if the policy says so, or all parts are exempt. `formats` replaces the group's formats; an
  // active override wins over both. Returns `like` if that is the same operation; it may be null. `again` announces a
  // gather from kept values, which Choice::automatic takes into account. Bytes in pairs, as uint16, are planned exactly
  // in groups of several nodes, which can keep them.
  PlanOrVerdict plan_gather(const Whole& output, const Whole& input, const PolicyOverride* formats, const Parts& parts,
                            bool again, const PlannedPtr& like);
  // Plans a gather of bfloat16, float16, or bytes as uint16; throws ValueError for other types. The policy does not
  // apply.
  PlannedPtr plan_lossless(const Whole& output, const Whole& input, const Parts& parts, const PlannedPtr& like);
  // Plans a reduction; `feedback` is the format of the residual, if any. The input may be narrower than a float32
  // output.
  PlanOrVerdict plan_reduce(const at::Tensor& output, const Whole& input, const ::c10d::ReduceOp& op,
                            const PolicyOverride* formats, const Parts& parts,
                            const std::optional<BlockFormat>& feedback, const PlannedPtr& like);
  PlanOrVerdict plan_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op, const PolicyOverride* formats,
                                const std::optional<BlockFormat>& feedback, const PlannedPtr& like);

  // Runs an operation. `output` is an all-reduce's tensor; a gather may leave `wires` instead. Without an input,
  // repeats a gather from kept values; precondition: no rank has changed the values since. `op` and `residual` are for
  // reductions.
  WorkPtr run(const PlannedOperation& planned, const Whole& output, const std::optional<Whole>& input,
              const std::optional<::c10d::ReduceOp>& op, const std::optional<Residual>& residual, const SitePtr& site,
              bool async, const std::optional<at::Tensor>& wires = {});
  // Decodes what the last gather has left into `output`, on the current stream, which must wait for it.
  void decode(const PlannedOperation& planned, const Whole& output, const at::Tensor& wires);
  // Prepares lossless gathers on a GPU: the next call of each sends the tensor next to it. Encodes all, and blocks the
  // host once.
  WorkPtr prepare(const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers, bool async);

 private:
  Policy policy_of(const PolicyOverride* formats) const;
  // Returns `like` if it was planned so, else a plan of what `make` returns.
  template <class Make>
  PlannedPtr planned(const PlannedPtr& like, Collective collective, HopFormats format, const Whole& whole,
                     const Parts& parts, const std::optional<BlockFormat>& feedback, bool in_one_hop, const Make& make);
  JobPtr job_of(const PlannedOperation& planned, const Whole& output, const std::optional<Whole>& input,
                const ::c10d::ReduceOp& op, const CallSettings& settings);
  JobPtr gather_of_wires(const PlannedOperation& planned, const at::Tensor& wires, const std::optional<Whole>& input,
                         const CallSettings& settings);
  CallSettings settings(bool async) const { return {options_->policy, options_->timeout, async}; }

  ::c10d::Backend& group_;
  c10::intrusive_ptr<ZcommOptions> options_;
  CompressedCalls& compressed_;
};

}  // namespace zcomm::c10d_binding
