// Runners of jobs, one for each kind of device.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "c10d/base/pointers.hpp"
#include "c10d/job/job.hpp"
#include "nccl_rendezvous.hpp"

namespace zcomm::c10d_binding {

inline constexpr std::chrono::hours kNoLimit{24 * 365};  // of a wait for jobs

// Runner for CPU tensors: one job at a time, in the order of the calls, on the caller's thread or its own.
//
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

struct HeldTensors;

// Runner for GPU tensors, with the stream semantics of ProcessGroupNCCL. A synchronous job is queued on the caller's
// current stream. An asynchronous one is queued on the group's stream, behind the caller's work, and wait() makes the
// current stream wait for it. The host never waits.
//
// Streams and events are c10's device-generic ones, so that one binding serves torch builds with and without CUDA.
class DeviceRunner {
 public:
  // Makes the communicator at the first job, on its device.
  using Connect = std::function<std::unique_ptr<Communicator>(at::Device)>;
  DeviceRunner(Connect connect, std::shared_ptr<GroupErrors> errors)
      : connect_(std::move(connect)), errors_(std::move(errors)) {}
  ~DeviceRunner();

  WorkPtr launch(JobPtr job);
  // Makes the current stream wait for all asynchronous jobs so far. Does not block the host.
  void join();
  // As those of the HostRunner.
  bool drain(std::chrono::milliseconds limit);
  void abort(const std::string& reason = kAborted) noexcept;
  void stop();

 private:
  void connect(at::Device device);
  void release_finished();

  Connect connect_;
  const std::shared_ptr<GroupErrors> errors_;
  const bool high_priority_ = has_high_priority();  // of the group's stream
  const bool blocking_wait_ = waits_on_host();

  std::timed_mutex launch_mutex_;  // jobs of several threads are queued one after the other
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;              // of asynchronous jobs
  std::optional<c10::Event> start_event_;          // a wait refers to the record that it saw, so one event is enough
  std::optional<c10::Event> end_event_;            // of the last synchronous job
  std::deque<std::shared_ptr<HeldTensors>> held_;  // of asynchronous jobs, in order

  std::mutex mutex_;  // guards the next two, for abort()
  std::unique_ptr<Communicator> communicator_;
  bool stopped_ = false;
};

}  // namespace zcomm::c10d_binding
