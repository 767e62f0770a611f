// GPU tensors, with the stream semantics of ProcessGroupNCCL: a synchronous job is queued on the caller's current
// stream; an asynchronous one on a stream of the group's own, behind what the caller had queued, and wait() makes the
// current stream wait for it. The host never waits.
//
// Streams and events are c10's device-generic ones, so that one binding serves torch builds with and without CUDA.
#pragma once

#include <deque>
#include <functional>
#include <optional>

#include "device_work.hpp"
#include "group_errors.hpp"
#include "runner.hpp"

namespace zcomm::c10d_binding {

class DeviceRunner final : public Runner {
 public:
  // `connect` makes the communicator at the first job, on its device, and arranges for failures of its watchdog to be
  // set in the Failure.
  using Connect = std::function<std::unique_ptr<Communicator>(at::Device, std::shared_ptr<Failure>)>;
  // `high_priority`: of the group's stream. `blocking_wait`: wait() blocks the host until the job is done.
  DeviceRunner(Connect connect, GroupErrors& errors, bool high_priority, bool blocking_wait)
      : connect_(std::move(connect)), errors_(errors), high_priority_(high_priority), blocking_wait_(blocking_wait) {}
  ~DeviceRunner() override;

  WorkPtr launch(std::unique_ptr<Job> job) override;
  // Throws if transfers have failed after their calls returned: whatever came of them is undefined.
  void check() const { failure_->check(); }
  bool drain(std::chrono::milliseconds limit) override;
  void abort(const std::string& reason) noexcept override;
  void stop() override;

 private:
  void connect(at::Device device);
  void run(Job& job, c10::Stream stream);
  void release_finished();

  Connect connect_;
  GroupErrors& errors_;
  bool high_priority_;
  bool blocking_wait_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();

  std::timed_mutex launch_mutex_;  // jobs of several threads are queued one after the other
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;              // of asynchronous jobs
  std::optional<c10::Event> start_event_;          // a wait holds on to the record that it saw, so one is enough
  std::deque<std::shared_ptr<HeldTensors>> held_;  // of asynchronous jobs, in their order

  std::mutex mutex_;  // of the three below, for abort()
  std::unique_ptr<Communicator> communicator_;
  std::string abort_reason_;
  bool stopped_ = false;
};

}  // namespace zcomm::c10d_binding
