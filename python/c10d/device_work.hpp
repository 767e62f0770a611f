// Work of a compressed collective on GPU tensors.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>

#include "job.hpp"

namespace zcomm::c10d_binding {

// Failure of a group's connection, or of its transfers after they were queued: set once, by the transport.
class Failure {
 public:
  void set(std::exception_ptr error);
  // Makes a connection in progress, and later ones, stop for this reason; the second function returns it.
  void interrupt(const std::string& reason);
  std::string interruption() const;
  // Returns null if there is no failure.
  std::exception_ptr get() const;
  // Throws the failure, if any.
  void check() const;

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::string interruption_;
};

// Tells whether the device is past an event; another thread may capture a graph.
bool is_over(const c10::Event& event);

// Tensors of an asynchronous job, which must outlive it even if the caller drops the work without waiting.
struct HeldTensors {
  explicit HeldTensors(at::DeviceType type) : end(type) {}

  c10::Event end;
  std::mutex mutex;
  std::vector<at::Tensor> tensors;

  void clear();
  bool is_clear();
  bool is_over() const { return zcomm::c10d_binding::is_over(end); }
};

// Made when the job is queued, with the job's stream current. A synchronous job holds no tensors: it runs on the
// caller's stream and needs no wait.
class DeviceWork final : public ::c10d::Work {
 public:
  DeviceWork(const Job& job, c10::Stream stream, std::shared_ptr<HeldTensors> held, std::shared_ptr<Failure> failure,
             bool blocking_wait);

  // Returns true once the device has done the job; for a synchronous job, once it is queued.
  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override { return failure_->get(); }
  // Makes the current stream wait. Throws if the group has failed meanwhile.
  void synchronize() override;
  // Waits as synchronize(); with a timeout, also blocks the host until the device is done. Throws if the group has
  // failed meanwhile, and on a timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  void block_host(std::chrono::milliseconds timeout);

  std::vector<at::Tensor> outputs_;
  c10::Stream stream_;
  std::shared_ptr<HeldTensors> held_;
  std::shared_ptr<Failure> failure_;
  bool blocking_wait_;
  std::uint64_t sequence_number_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of a synchronous job: made on demand
};

}  // namespace zcomm::c10d_binding
