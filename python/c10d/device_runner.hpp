// Runner for GPU tensors, with the stream semantics of ProcessGroupNCCL. A synchronous job is queued on the caller's
// current stream. An asynchronous one is queued on the group's stream, behind the caller's work, and wait() makes the
// current stream wait for it. The host never waits.
//
// Streams and events are c10's device-generic ones, so that one binding serves torch builds with and without CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "job.hpp"
#include "nccl_variables.hpp"
#include "pointers.hpp"

namespace zcomm::c10d_binding {

struct HeldTensors;

// Failure of a group's connection, or of its transfers after they were queued: set once, by the transport.
class Failure {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  // Makes a connection in progress, and later ones, stop for this reason; the second function returns it.
  void interrupt(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    interruption_ = reason;
  }
  std::string interruption() const {
    const std::lock_guard lock(mutex_);
    return interruption_;
  }
  // Returns null if there is no failure.
  std::exception_ptr get() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  // Throws the failure, if any.
  void check() const {
    if (const std::exception_ptr error = get()) std::rethrow_exception(error);
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::string interruption_;
};

class DeviceRunner {
 public:
  // Makes the communicator at the first job, on its device. It sets failures in the Failure, which can interrupt it.
  using Connect = std::function<std::unique_ptr<Communicator>(at::Device, std::shared_ptr<Failure>)>;
  DeviceRunner(Connect connect, GroupErrors& errors) : connect_(std::move(connect)), errors_(errors) {}
  ~DeviceRunner();

  WorkPtr launch(JobPtr job);
  // Throws if transfers have failed after their calls returned, with undefined results.
  void check() const { failure_->check(); }
  // Makes the current stream wait for all asynchronous jobs so far. Does not block the host.
  void join();
  // As those of the HostRunner.
  bool drain(std::chrono::milliseconds limit);
  void abort(const std::string& reason) noexcept;
  void stop();

 private:
  void connect(at::Device device);
  void release_finished();

  Connect connect_;
  GroupErrors& errors_;
  const bool high_priority_ = has_high_priority();  // of the group's stream
  const bool blocking_wait_ = waits_on_host();
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();

  std::timed_mutex launch_mutex_;  // jobs of several threads are queued one after the other
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;              // of asynchronous jobs
  std::optional<c10::Stream> captured_;            // of the last captured job
  std::uint64_t captured_graph_ = 0;               // which it is part of
  std::optional<c10::Event> start_event_;          // a wait refers to the record that it saw, so one event is enough
  std::optional<c10::Event> end_event_;            // of the last synchronous job
  std::deque<std::shared_ptr<HeldTensors>> held_;  // of asynchronous jobs, in order

  std::mutex mutex_;  // guards the next two, for abort()
  std::unique_ptr<Communicator> communicator_;
  bool stopped_ = false;
};

}  // namespace zcomm::c10d_binding
