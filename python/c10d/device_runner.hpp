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
#include "nccl_rendezvous.hpp"
#include "pointers.hpp"

namespace zcomm::c10d_binding {

struct HeldTensors;

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
  void abort() noexcept;
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
