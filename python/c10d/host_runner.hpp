// Runner for CPU tensors: one job at a time, in the order of the calls, on the caller's thread or its own.
#pragma once

#include <functional>
#include <mutex>

#include "job.hpp"
#include "pointers.hpp"

namespace zcomm::c10d_binding {

// All functions release Python's lock while they wait, because jobs may need it.
class HostRunner {
 public:
  // Makes the communicator at the first job. Jobs in progress hold the group, which owns this object.
  HostRunner(::c10d::Backend& group, std::function<std::unique_ptr<Communicator>()> connect, GroupErrors& errors);
  ~HostRunner();

  // Runs the job after all earlier ones: on this thread if it is synchronous and nothing else is queued, which saves
  // two thread switches; else on the runner's thread. A callback on that thread may launch jobs, too: each has then run
  // on return. If callbacks are nested deeply, it runs after they have returned.
  WorkPtr launch(JobPtr job);
  // Blocks until all jobs so far are done; returns false after `limit`.
  bool drain(std::chrono::milliseconds limit);
  // Makes jobs in progress and later ones fail, on the peers as well. Thread-safe.
  void abort() noexcept;
  // Launches no more jobs, runs those in the queue and ends the thread. Idempotent and thread-safe.
  void stop();

 private:
  class HostWork;
  struct Queue;
  Communicator& communicator();

  ::c10d::Backend& group_;
  std::function<std::unique_ptr<Communicator>()> connect_;
  GroupErrors& errors_;
  std::mutex mutex_;  // guards the next one, for abort()
  std::unique_ptr<Communicator> communicator_;
  // Shared with the thread, which may hold the last reference to the group and destroy it.
  const std::shared_ptr<Queue> queue_;
};

}  // namespace zcomm::c10d_binding
