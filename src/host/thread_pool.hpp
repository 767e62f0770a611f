// The threads that host codecs share: one small pool per process.
#pragma once

#include <cstdint>

namespace zcomm {

// Calls task(arg, i) once for every i in [0, num_tasks), in any order, on this thread and on pool workers; returns when
// all are done. Any number of threads may be in here at once. The caller works too, so a call finishes even where
// there are no workers: with one thread, in a forked child, or when none could be started. The first exception
// stops tasks that have not begun and is rethrown.
void run_tasks(std::int64_t num_tasks, void (*task)(const void* arg, std::int64_t i), const void* arg);

template <class Function>
void parallel_for(std::int64_t num_tasks, const Function& function) {
  run_tasks(num_tasks, [](const void* arg, std::int64_t i) { (*static_cast<const Function*>(arg))(i); }, &function);
}

}  // namespace zcomm
