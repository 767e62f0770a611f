// Events of compressed calls for torch's profilers: one per call, with ranges inside of it. While no profiler is on, an
// event or a range only checks the thread's callbacks.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "job.hpp"

namespace zcomm::c10d_binding {

// Launch of a call, until the end of the scope, as torch's own backends record it: Kineto, HTA and Chakra read the
// event `record_param_comms`. It has "zcomm plan" in addition to the usual arguments and, if known before the call,
// this rank's "Wire bytes intra-node" and "Wire bytes inter-node".
class CallEvent {
 public:
  // Takes the group's `ranks` in the world; empty if it is the world.
  CallEvent(const Job& job, const CallSummary& call, const ::c10d::Backend& group,
            const std::vector<std::uint64_t>& ranks);

 private:
  void begin(const Job& job, const CallSummary& call, const ::c10d::Backend& group,
             const std::vector<std::uint64_t>& ranks);

  std::vector<c10::IValue> inputs_;
  std::optional<c10::DebugInfoGuard> debug_info_;
  at::RecordFunction event_;  // last: it ends before the fields above
};

// Wraps a codec or a transport to record ranges: "zcomm::encode", "zcomm::decode", "zcomm::decode_sum",
// "zcomm::decode_sum_encode", "zcomm::start_transfer" and "zcomm::wait_for_transfer". On a GPU they are launch times.
std::unique_ptr<Codec> with_ranges(std::unique_ptr<Codec> codec);
std::unique_ptr<Transport> with_ranges(std::unique_ptr<Transport> transport);

// Profilers that are on in a thread. They do not see other threads that work for it, unless those adopt them.
struct Profilers {
  std::shared_ptr<c10::ThreadLocalDebugInfo> state;
  at::RecordFunctionTLS callbacks;
};
// Returns the profilers of this thread, if any.
std::optional<Profilers> current_profilers();

// Adopts them for a scope.
class WithProfilers {
 public:
  explicit WithProfilers(const std::optional<Profilers>& profilers);
  ~WithProfilers();
  WithProfilers(const WithProfilers&) = delete;
  WithProfilers& operator=(const WithProfilers&) = delete;

 private:
  std::optional<Profilers> before_;
};

}  // namespace zcomm::c10d_binding
