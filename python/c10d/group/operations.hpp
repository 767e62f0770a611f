// Operations that their callers hold, for repeated calls with options per tensor: parts that are sent exactly, wires or
// values kept in the node (hpZ of ZeRO++, arXiv 2306.10209), error feedback, and separate counters. A call equal to the
// one before plans nothing.
#pragma once

#include <tuple>
#include <variant>

#include "process_group.hpp"

namespace zcomm::c10d_binding {

// Pairs of a number of elements of a shard and whether they are sent exactly. Empty: the policy's format applies to
// all.
using Parts = std::vector<std::pair<std::int64_t, bool>>;

// Gathered, scattered or reduced tensor: one, or one for each part, each with the parts of all ranks in rank order.
// Also a rank's own shard that is gathered: one tensor, or one for each part.
using TensorOrParts = std::variant<at::Tensor, std::vector<at::Tensor>>;

// Operation, and the tensors that it was planned for.
struct PlannedOperation {
  c10::weak_intrusive_ptr<ProcessGroup> group;
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

// Plans a gather. A call stays exact if the policy says so, or all parts are exempt. `formats` replaces the group's
// formats; an active override wins over both. Returns `like` if that is the same operation; it may be null. `again`
// announces a gather from kept values, which Choice::automatic takes into account. Bytes in pairs, as uint16, are
// planned exactly in groups of several nodes, which can keep them.
PlanOrVerdict plan_gather(ProcessGroup& group, TensorOrParts whole, TensorOrParts shard, const PolicyOverride* formats,
                          const Parts& parts, bool again, const PlannedPtr& like);
// Plans a gather of bfloat16, float16, or bytes as uint16; throws ValueError for other types. The policy does not
// apply.
PlannedPtr plan_lossless(ProcessGroup& group, TensorOrParts whole, TensorOrParts shard, const Parts& parts,
                         const PlannedPtr& like);
// Plans a reduction; `feedback` is the format of the residual, if any. The input may be narrower than a float32
// output.
PlanOrVerdict plan_reduce(ProcessGroup& group, const at::Tensor& output, TensorOrParts whole,
                          const ::c10d::ReduceOp& op, const PolicyOverride* formats, const Parts& parts,
                          const std::optional<BlockFormat>& feedback, const PlannedPtr& like);
PlanOrVerdict plan_all_reduce(ProcessGroup& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                              const PolicyOverride* formats, const std::optional<BlockFormat>& feedback,
                              const PlannedPtr& like);

// Runs an operation. `results` is an all-reduce's tensor; a gather may leave `wires` instead. Without `values`, repeats
// a gather from kept ones; precondition: no rank has changed them since. `op` and `residual` are for reductions.
WorkPtr run(const PlannedOperation& planned, std::optional<TensorOrParts> results, std::optional<TensorOrParts> values,
            const std::optional<::c10d::ReduceOp>& op, const std::optional<Residual>& residual, const SitePtr& site,
            bool async, const std::optional<at::Tensor>& wires);
// Decodes what the last gather has left into `whole`, on the current stream, which must wait for it.
void decode(const PlannedOperation& planned, TensorOrParts whole, const at::Tensor& wires);
// Prepares lossless gathers on a GPU: the next call of each sends the tensor next to it. Encodes all, and blocks the
// host once.
WorkPtr prepare(ProcessGroup& group, const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers,
                bool async);

}  // namespace zcomm::c10d_binding
