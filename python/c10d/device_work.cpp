#include "device_work.hpp"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "zcomm/cuda.hpp"

namespace zcomm::c10d_binding {

void Failure::set(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

void Failure::interrupt(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  interruption_ = reason;
}

std::string Failure::interruption() const {
  const std::lock_guard lock(mutex_);
  return interruption_;
}

std::exception_ptr Failure::get() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Failure::check() const {
  if (const std::exception_ptr error = get()) std::rethrow_exception(error);
}

void HeldTensors::clear() {
  std::vector<at::Tensor> freed;  // freed after the lock is released
  const std::lock_guard lock(mutex);
  freed.swap(tensors);
}

bool HeldTensors::is_clear() {
  const std::lock_guard lock(mutex);
  return tensors.empty();
}

bool is_over(const c10::Event& event) {
  const RelaxedCaptureGuard relaxed;
  return event.query();
}

DeviceWork::DeviceWork(const Job& job, c10::Stream stream, std::shared_ptr<HeldTensors> held,
                       std::shared_ptr<Failure> failure, bool blocking_wait)
    : Work(-1, job.type, job.title, job.inputs),
      outputs_(job.outputs),
      stream_(stream),
      held_(std::move(held)),
      failure_(std::move(failure)),
      blocking_wait_(blocking_wait),
      sequence_number_(job.sequence_number) {
  if (held_) getFuture();  // while nothing else follows the job on its stream
}

bool DeviceWork::isCompleted() { return !held_ || exception() || held_->is_over(); }

void DeviceWork::synchronize() {
  if (held_) {
    held_->end.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
    held_->clear();
  }
  failure_->check();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (held_ && (timeout != kNoTimeout || blocking_wait_)) block_host(timeout);
  failure_->check();
  return true;
}

void DeviceWork::block_host(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  while (!held_->is_over() && !exception()) {
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
      C10_THROW_ERROR(DistBackendError, "zcomm: the collective was not done within the " +
                                            std::to_string(timeout.count()) + " ms that wait() was given");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<at::Device>{stream_.device()});
    const c10::StreamGuard on_stream(stream_);  // orders the future's callbacks and waiters
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace zcomm::c10d_binding
