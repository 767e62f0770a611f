// Runner for CPU tensors: one job at a time, in the order of the calls, on the caller's thread or its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "job.hpp"
#include "pointers.hpp"

namespace zcomm::c10d_binding {

// All functions release Python's lock while they wait, because jobs may need it. The runner's thread keeps it alive,
// and may hold the last reference to the group and destroy that.
class HostRunner : public std::enable_shared_from_this<HostRunner> {
 public:
  // Makes the communicator at the first job. Jobs in progress hold the group, which owns the communicator.
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
  // Stops, and gives up what belongs to the group.
  void leave_group();

 private:
  class HostWork;
  using Lock = std::unique_lock<std::mutex>;  // of the queue
  Communicator& communicator();
  void run_one(Lock& lock);
  void run_inside_callback(Lock& lock, std::uint64_t target);
  void run_until_stopped();
  bool is_own_thread() const { return std::this_thread::get_id() == thread_id_; }

  ::c10d::Backend& group_;
  std::function<std::unique_ptr<Communicator>()> connect_;
  GroupErrors& errors_;
  std::mutex communicator_mutex_;  // guards the next one, for abort()
  std::unique_ptr<Communicator> communicator_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<HostWork>> tasks_;
  bool running_ = false;  // a task taken from `tasks_` is running
  bool stopped_ = false;
  std::uint64_t num_pushed_ = 0;
  std::uint64_t num_done_ = 0;
  std::uint64_t num_told_ = 0;
  std::thread thread_;  // started by the first task that needs it
  std::thread::id thread_id_;
  const char* bottom_ = nullptr;             // of the thread's stack
  static thread_local HostRunner* telling_;  // runner whose caller this thread is telling, if any
};

}  // namespace zcomm::c10d_binding
