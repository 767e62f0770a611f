// GPU tensors, with the stream semantics of ProcessGroupNCCL: a synchronous job is queued on the caller's current
// stream; an asynchronous one on a stream of the group's own, behind what the caller had queued, and wait() makes the
// current stream wait for it. The host never waits.
//
// Streams and events are c10's device-generic ones, so that one binding serves torch builds with and without CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>

#include "runner.hpp"

namespace zcomm::c10d_binding {

// What went wrong with a group's transfers after they were queued: set once, by the transport's watchdog.
class Failure {
 public:
  void set(std::exception_ptr error);
  // Null while all is well.
  std::exception_ptr get() const;

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

// Tensors of an asynchronous job: they must outlive it, even if its caller drops the work without waiting.
struct Stash {
  explicit Stash(at::DeviceType type) : end(type) {}

  c10::Event end;
  std::mutex mutex;
  std::vector<at::Tensor> tensors;

  void clear();
  bool is_clear();
};

class DeviceRunner final : public Runner {
 public:
  // `connect` makes the communicator at the first job, on its device, and arranges for failures of its watchdog to be
  // set in the Failure.
  using Connect = std::function<std::unique_ptr<Communicator>(at::Device, std::shared_ptr<Failure>)>;
  // `high_priority`: of the group's stream. `blocking_wait`: wait() blocks the host until the job is done.
  DeviceRunner(Connect connect, OnError on_error, bool high_priority, bool blocking_wait)
      : connect_(std::move(connect)),
        on_error_(std::move(on_error)),
        high_priority_(high_priority),
        blocking_wait_(blocking_wait) {}
  ~DeviceRunner() override { stop(); }

  c10::intrusive_ptr<::c10d::Work> launch(Job job) override;
  bool drain(std::chrono::milliseconds limit) override;
  void abort(const std::string& reason) noexcept override;
  void stop() override;

 private:
  void connect(at::Device device);
  void run(const Job& job, c10::Stream stream);
  void release_finished();

  Connect connect_;
  OnError on_error_;
  bool high_priority_;
  bool blocking_wait_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();

  std::timed_mutex launch_mutex_;  // jobs of several threads are queued one after the other
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;      // of asynchronous jobs
  std::optional<c10::Event> start_event_;  // a wait holds on to the record that it saw, so one is enough
  std::deque<std::shared_ptr<Stash>> stashes_;

  std::mutex mutex_;  // of the three below, for abort()
  std::unique_ptr<Communicator> communicator_;
  std::string abort_reason_;
  bool stopped_ = false;
};

}  // namespace zcomm::c10d_binding
