// Calls that may never return, on threads of their own.
#pragma once

#include <future>
#include <thread>
#include <utility>

namespace zcomm {

// Runs `call` on a thread that nobody joins: whoever does not want to wait any longer for the result just leaves. So
// `call` must own all that it uses.
template <class Call>
auto run_aside(Call call) {
  std::packaged_task task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace zcomm
