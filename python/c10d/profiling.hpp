// What torch's profilers see of compressed calls: an event for each call, and ranges inside of it. While no profiler is
// on, an event or a range costs a look at the thread's callbacks.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "compressed_jobs.hpp"

namespace zcomm::c10d_binding {

// The launch of a call, from here to the end of the scope, as torch's own backends record theirs: Kineto, HTA and
// Chakra read the event `record_param_comms`. Beside its usual arguments it has "zcomm plan" and, where they are known
// before the call, "Wire bytes intra-node" and "Wire bytes inter-node" of this rank.
class CallEvent {
 public:
  // `ranks`: of the group, in the world; empty: it is the world.
  CallEvent(const CompressedJob& job, const CallSummary& call, const ::c10d::Backend& group,
            const std::vector<std::uint64_t>& ranks);

 private:
  void begin(const CompressedJob& job, const CallSummary& call, const ::c10d::Backend& group,
             const std::vector<std::uint64_t>& ranks);

  std::vector<c10::IValue> inputs_;
  std::optional<c10::DebugInfoGuard> debug_info_;
  at::RecordFunction event_;  // last: it ends while the others are there
};

// The same codec and transport, with ranges: "zcomm::encode", "zcomm::decode", "zcomm::decode_sum",
// "zcomm::decode_sum_encode", "zcomm::start_transfer" and "zcomm::wait_for_transfer". On a GPU they are the time to
// launch.
std::unique_ptr<Codec> with_ranges(std::unique_ptr<Codec> codec);
std::unique_ptr<Transport> with_ranges(std::unique_ptr<Transport> transport);

// The profilers that are on in a thread. They do not see what other threads do for it, unless those take them on.
struct Profilers {
  std::shared_ptr<c10::ThreadLocalDebugInfo> state;
  at::RecordFunctionTLS callbacks;
};
// Of this thread; nothing if there are none.
std::optional<Profilers> current_profilers();

// Takes them on for a scope.
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
