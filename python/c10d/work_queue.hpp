// Runs the compressed collectives of a group one at a time, in the order of their calls.
#pragma once

#include <chrono>
#include <memory>

namespace zcomm::c10d_binding {

class WorkQueue {
 public:
  // Neither function throws.
  class Task {
   public:
    virtual ~Task() = default;
    // Does the work, and lets go of what it needed for it.
    virtual void run() = 0;
    // Tells the caller that it is done. Runs when the queue is free again: it may call the queue, and wait.
    virtual void tell() = 0;
  };

  WorkQueue();
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Runs `task` after all earlier ones: on this thread if `here` and nothing else is queued, which saves two thread
  // switches, else on a thread of the queue's own. Returns false, and does nothing, after stop().
  bool push(std::unique_ptr<Task> task, bool here);

  // Blocks until all tasks so far have run, or `limit` has passed: then false.
  bool drain(std::chrono::milliseconds limit);

  // Runs what is queued, then ends the thread. Idempotent, any thread.
  void stop();

  // These three let go of Python's lock while they wait, as tasks may need it.

 private:
  struct State;
  // Shared with the thread, which may be the last one to hold the group, and so to destroy it.
  std::shared_ptr<State> state_;
};

}  // namespace zcomm::c10d_binding
