// Queue that runs the compressed collectives of a group one at a time, in the order of their calls.
#pragma once

#include <chrono>
#include <memory>

namespace zcomm::c10d_binding {

class WorkQueue {
 public:
  // Task of the queue. Neither function throws.
  class Task {
   public:
    virtual ~Task() = default;
    // Does the work, and releases its resources.
    virtual void run() = 0;
    // Tells the caller that the task is done. Runs when the queue is free again: it may call the queue, and wait.
    virtual void tell() = 0;
  };

  WorkQueue();
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Runs `task` after all earlier ones: on this thread if `here` and nothing else is queued, which saves two thread
  // switches; else on the queue's thread. A callback on that thread may push, too: the task has then run on return. If
  // callbacks are nested deeply, it runs after they have returned. Returns false and does nothing after stop().
  bool push(std::unique_ptr<Task> task, bool here);

  // Blocks until all tasks so far have run; returns false after `limit`.
  bool drain(std::chrono::milliseconds limit);

  // Runs the queued tasks, then ends the thread. Idempotent, thread-safe.
  void stop();

  // Runs and tells the next task inside of a callback on the queue's own thread, where nobody else can. Returns false
  // and does nothing elsewhere, or without a task.
  static bool advance_inside_callback(const void* id);
  const void* id() const { return state_.get(); }

  // All functions above release Python's lock while they wait, because tasks may need it.

 private:
  struct State;
  // Shared with the thread, which may hold the last reference to the group and destroy it.
  std::shared_ptr<State> state_;
};

}  // namespace zcomm::c10d_binding
