// Events for torch's profilers: one per call, with ranges inside of it. While no profiler is on, a call only checks the
// thread's callbacks.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "observer.hpp"

namespace zcomm::c10d_binding {

// Records the launch of a job as torch's own backends do: Kineto, HTA and Chakra read the event `record_param_comms`.
class Profilers final : public Observer {
 public:
  // Borrows `group`. `ranks` are the group's, in the world; empty if it is the world.
  Profilers(const ::c10d::Backend& group, std::vector<std::uint64_t> ranks) : group_(group), ranks_(std::move(ranks)) {}

  std::shared_ptr<void> begin(Job& job) override;

 private:
  const ::c10d::Backend& group_;
  const std::vector<std::uint64_t> ranks_;
};

// Returns what begins a range for the profilers of this thread: "zcomm::encode", "zcomm::decode", "zcomm::decode_sum",
// "zcomm::decode_sum_encode", "zcomm::check", "zcomm::start_transfer" or "zcomm::wait_for_transfer". Null if none is
// on. On a GPU ranges are launch times.
BeginRange profilers_ranges();

}  // namespace zcomm::c10d_binding
