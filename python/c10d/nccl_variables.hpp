// Variables of torch's NCCL backend that count for compressed calls on GPUs, too.
#pragma once

#include <torch/csrc/distributed/c10d/Utils.hpp>

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

}  // namespace zcomm::c10d_binding
