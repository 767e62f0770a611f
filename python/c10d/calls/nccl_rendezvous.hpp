// Rendezvous of a group's ranks for an NCCL transport, reports of its failure, and the variables of torch's NCCL
// backend that count for compressed calls on GPUs, too.
#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "c10d/base/group_errors.hpp"
#include "c10d/base/python_hooks.hpp"
#include "options.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

// Whether the streams of asynchronous calls have high priority. torch's own default is that they have not.
inline bool has_high_priority() { return ::c10d::getCvarBool({"TORCH_NCCL_HIGH_PRIORITY"}, true); }

// Whether wait() blocks the host until the call is done.
inline bool waits_on_host() { return ::c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT"}, false); }

// Whether the process ends where transfers fail whose calls have returned. As in torch, 0 and 2 leave it alive, and so
// do waits on the host, which raise.
inline bool ends_on_failure() {
  const int handling = ::c10d::getCvarInt({"TORCH_NCCL_ASYNC_ERROR_HANDLING"}, 3);
  return handling != 0 && handling != 2 && !waits_on_host();
}

// How long a call of CUDA or NCCL may keep the watchdog before the process ends; 0: as long as it likes.
inline std::chrono::seconds heartbeat_limit() {
  if (!::c10d::getCvarBool({"TORCH_NCCL_ENABLE_MONITORING"}, true)) return {};
  return std::chrono::seconds(::c10d::getCvarInt({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"}, 480));
}

// Connects this rank of `group` with its peers in `topology`, which have met in PythonHooks::meet_for_nccl. Sets later
// failures in `errors` and reports them to the peers in the store. The transport must be destroyed before `group`.
std::unique_ptr<Transport> connect_nccl(const ::c10d::Backend& group, const PythonHooks& hooks,
                                        const ZcommOptions& options, const Topology& topology,
                                        const std::shared_ptr<GroupErrors>& errors);

}  // namespace zcomm::c10d_binding
