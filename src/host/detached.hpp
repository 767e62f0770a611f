// Calls that may never return, on separate threads.
#pragma once

#include <future>
#include <thread>
#include <utility>

namespace zcomm {

// Runs `call` on a detached thread, so that the caller can stop waiting for the result. `call` must own all that it
// uses.
template <class Call>
auto run_detached(Call call) {
  std::packaged_task task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace zcomm
