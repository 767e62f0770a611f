// Request: the plain values of a collective. Torch's calls, planned operations and rehearsals fill in one.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "c10d/policy/policy.hpp"
#include "stats.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/operation.hpp"

namespace zcomm::c10d_binding {

// Settings of one call, from its own options and the group's.
struct CallSettings {
  Policy policy;
  std::chrono::milliseconds timeout{0};
  bool async = false;      // the call returns before it is complete
  bool rehearsal = false;  // see AutoPolicy: counted apart, never sampled, draws no seed of a step
};

// Pairs of a number of elements of a shard and whether they are sent exactly. Empty: the policy's format applies to
// all.
using Parts = std::vector<std::pair<std::int64_t, bool>>;

struct Request {
  at::Device device() const { return (outputs.empty() ? inputs : outputs)[0].device(); }

  Call call;              // what the policy decides about
  Verdict verdict{};      // what it has decided
  ::c10d::OpType type{};  // torch's name
  CallSettings settings;  // of a planned operation without the formats, which it has
  // Held until the call is done. The gathered, scattered or reduced tensor is one, one for each rank in a list, or one
  // for each part. A gather from kept values has no input, a rank that receives nothing no output.
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  ::c10d::ReduceOp op = ::c10d::ReduceOp::SUM;
  int root = 0;
  std::vector<std::int64_t> sent;  // of an all-to-all: elements to each rank, and from each
  std::vector<std::int64_t> received;
  SitePtr site;

  // --- To plan it

  Parts parts;
  std::optional<BlockFormat> residual_format;  // of error feedback
  bool lossless = false;                       // a gather, by differences
  bool compared = false;  // ranks compare a reduction whose parts are all exact, too: it is planned as others
  bool in_one_hop = false;
  bool leaves_wires = false;  // a gather, in the output in place of values

  // --- To run a planned operation

  std::optional<Feedback> feedback;
  std::vector<at::Tensor> memory;                        // its residual, and the values that are kept
  std::vector<std::pair<SitePtr, std::int64_t>> shares;  // of a preparation: sites of the gathers, and their shares of
                                                         // the bytes between nodes
};

// Describes a call for the policy; `whole` is the gathered, scattered or reduced tensor, in parts.
Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole,
              const ::c10d::ReduceOp& op = ::c10d::ReduceOp::SUM);

}  // namespace zcomm::c10d_binding
