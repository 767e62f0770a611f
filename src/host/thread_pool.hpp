// The threads that host codecs share: one small pool per process.
#pragma once

#include <cstdint>

#include "zcomm/codec.hpp"

namespace zcomm {

// Calls task(arg, i) once for every i in [0, num_tasks), in any order, on this thread and on pool workers; returns when
// all are done. Any number of threads may be in here at once. The caller works too, so a call finishes even where
// there are no workers: in a forked child, or when none could be started. The first exception stops tasks that have not
// begun and is rethrown.
void run_tasks(std::int64_t num_tasks, void (*task)(const void* arg, std::int64_t i), const void* arg);

// function(i) for every i in [0, num_tasks), by run_tasks if there is more than one task and more than one thread.
template <class Function>
void parallel_for(std::int64_t num_tasks, const Function& function) {
  if (num_tasks <= 1 || num_threads() == 1) {
    for (std::int64_t i = 0; i < num_tasks; ++i) function(i);
    return;
  }
  run_tasks(num_tasks, [](const void* arg, std::int64_t i) { (*static_cast<const Function*>(arg))(i); }, &function);
}

}  // namespace zcomm
