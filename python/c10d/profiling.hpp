// Events of compressed calls for torch's profilers: one per call, with ranges inside of it. While no profiler is on, a
// call only checks the thread's callbacks.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "flight_recorder.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

// Records the launch of a call as torch's own backends do, until the result is dropped: Kineto, HTA and Chakra read the
// event `record_param_comms`. `ranks` are the group's in the world; empty if it is the world.
std::shared_ptr<void> record_launch(const ::c10d::Backend& group, const std::vector<std::uint64_t>& ranks,
                                    const Job& job, const RecordedCall& call);

// Returns what begins a range for the profilers of this thread: "zcomm::encode", "zcomm::decode", "zcomm::decode_sum",
// "zcomm::decode_sum_encode", "zcomm::start_transfer" or "zcomm::wait_for_transfer". Null if none is on. On a GPU
// ranges are launch times.
BeginRange profilers_ranges();

}  // namespace zcomm::c10d_binding
