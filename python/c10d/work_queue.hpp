// Runs the compressed collectives of a group one at a time, in the order of their calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace zcomm::c10d_binding {

class WorkQueue {
 public:
  WorkQueue() = default;
  ~WorkQueue() { stop(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Runs `task` after all earlier ones: on this thread if `here` and nothing else is queued, which saves two thread
  // switches, else on a thread of the queue's own. Tasks do not throw. Returns false, and does nothing, after stop().
  bool push(std::function<void()> task, bool here);

  // Blocks until all tasks so far have run, or `limit` has passed: then false.
  bool drain(std::chrono::milliseconds limit = std::chrono::hours(24 * 365));

  // Runs what is queued, then ends the thread. Idempotent, any thread. Lets go of Python's lock while it waits, as
  // tasks may need it.
  void stop();

 private:
  void run();
  bool idle() const { return tasks_.empty() && !running_; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool running_ = false;  // a task, taken from tasks_ or on its caller's thread
  bool stopped_ = false;
  std::thread thread_;  // started by the first task that needs it
};

// Runs `body` without Python's lock if this thread has it.
void without_gil(const std::function<void()>& body);

}  // namespace zcomm::c10d_binding
