// Operations that their callers hold, for repeated calls with options per tensor: parts that are sent exactly, wires or
// values kept in the node (hpZ of ZeRO++, arXiv 2306.10209), error feedback, and separate counters. A call equal to the
// one before plans nothing.
#pragma once

#include <c10/core/Event.h>

#include <tuple>
#include <variant>

#include "compressed_calls.hpp"

namespace zcomm::c10d_binding {

// Gathered, scattered or reduced tensor: one, or one for each part, each with the parts of all ranks in rank order.
// Also a rank's own shard that is gathered: one tensor, or one for each part.
using TensorOrParts = std::variant<at::Tensor, std::vector<at::Tensor>>;
std::vector<at::Tensor> whole_of(TensorOrParts given);

// Secondary shard in a tensor, and the end of its last decode on a GPU, which later calls wait for.
struct TensorSecondaryShard : SecondaryShard {
  void hold(at::Tensor tensor) {
    memory = {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
    data = std::move(tensor);
  }

  at::Tensor data;  // uint8 [secondary_bytes of the operation], on the device of the calls
  std::optional<c10::Event> decoded;
};

// What an operation was planned for.
struct PlanKey {
  Collective collective;
  HopFormats format;  // of the parts that are not exact
  at::DeviceType device;
  at::ScalarType dtype;
  std::int64_t num_elements;  // of the gathered, scattered or reduced tensor
  Parts parts;
  std::optional<BlockFormat> residual_format;
  bool in_one_hop;
  bool leaves_wires;

  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

struct PlannedOperation : PlanKey {
  c10::weak_intrusive_ptr<::c10d::Backend> group;
  CompressedCalls* calls;  // the group's, while there is one
  OperationPtr operation;
  std::shared_ptr<TensorSecondaryShard> secondary;
};
using PlannedPtr = std::shared_ptr<PlannedOperation>;
// Returns the gather that was planned. Throws ValueError if that is no gather.
const Gather& gather_of(const PlannedOperation& planned);
// A planned operation, or why the call stays exact.
using PlanOrVerdict = std::variant<PlannedPtr, Verdict>;

// Residual in the planned format: uint8 [residual_bytes of the operation] on the device of the call, its decay, and
// whether it is empty.
using Residual = std::tuple<at::Tensor, float, bool>;

// Plans a request, whose call has but its collective and `again`. It stays exact if the policy says so, or if all parts
// are exempt and it is not to be compared. `formats` replaces the group's formats; an active override wins over both.
// Returns `like` if that is the same operation; it may be null. Bytes in pairs, as uint16, are gathered exactly, in
// groups of several nodes, which can keep them. The policy does not apply to lossless gathers, which are of bfloat16,
// float16, or bytes as uint16. The input of a reduction may be narrower than a float32 output. Throws ValueError.
PlanOrVerdict plan(CompressedCalls& calls, Request request, const PolicyOverride* formats, const PlannedPtr& like);

// Runs an operation. `results` is an all-reduce's tensor; a gather may leave `wires` instead. Without `values`, repeats
// a gather from kept ones; precondition: no rank has changed them since. `op` and `residual` are for reductions.
WorkPtr run(const PlannedOperation& planned, std::optional<TensorOrParts> results, std::optional<TensorOrParts> values,
            const std::optional<::c10d::ReduceOp>& op, const std::optional<Residual>& residual, const SitePtr& site,
            bool async, const std::optional<at::Tensor>& wires);
// Decodes what the last gather has left into `whole`, on the current stream, which must wait for it.
void decode(const PlannedOperation& planned, TensorOrParts whole, const at::Tensor& wires);
// Prepares lossless gathers on a GPU: the next call of each sends the tensor next to it. Encodes all, and blocks the
// host once.
WorkPtr prepare(CompressedCalls& calls, const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers,
                bool async);
// Gathers a few uint16 of each rank on the CPU, from which all ranks decide alike. Counted as rehearsals are.
WorkPtr gather_numbers(CompressedCalls& calls, const at::Tensor& output, const at::Tensor& input, const SitePtr& site);

}  // namespace zcomm::c10d_binding
