// Threads that host codecs share: one small pool per process.
#pragma once

#include <cstdint>

#include "zcomm/codec.hpp"

namespace zcomm {

// Calls task(arg, i) once for every i in [0, num_tasks), in any order, on this thread and on pool workers. Returns when
// all are done. Thread-safe. The caller works too, so a call finishes even without workers: in a forked child, or if
// none could be started. The first exception skips tasks that have not begun, and is rethrown.
void run_tasks(std::int64_t num_tasks, void (*task)(const void* arg, std::int64_t i), const void* arg);

// Calls function(i) for every i in [0, num_tasks), in parallel if there are several tasks and threads.
template <class Function>
void parallel_for(std::int64_t num_tasks, const Function& function) {
  if (num_tasks <= 1 || num_threads() == 1) {
    for (std::int64_t i = 0; i < num_tasks; ++i) function(i);
    return;
  }
  run_tasks(num_tasks, [](const void* arg, std::int64_t i) { (*static_cast<const Function*>(arg))(i); }, &function);
}

}  // namespace zcomm
