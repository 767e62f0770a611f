#include "device_work.hpp"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace zcomm::c10d_binding {

DeviceWork::DeviceWork(const Job& job, c10::Stream stream, std::shared_ptr<Stash> stash,
                       std::shared_ptr<Failure> failure, bool blocking_wait)
    : Work(-1, job.type, job.title, job.inputs),
      outputs_(job.outputs),
      stream_(stream),
      stash_(std::move(stash)),
      failure_(std::move(failure)),
      blocking_wait_(blocking_wait),
      sequence_number_(job.sequence_number) {
  if (stash_) getFuture();  // while nothing else is behind the job on its stream
}

bool DeviceWork::isCompleted() { return !stash_ || exception() || stash_->end.query(); }

void DeviceWork::synchronize() {
  if (!stash_) return;
  stash_->end.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
  stash_->clear();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (stash_ && (timeout != kNoTimeout || blocking_wait_)) block_host(timeout);
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

void DeviceWork::block_host(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  while (!stash_->end.query() && !exception()) {
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
    const c10::StreamGuard on_stream(stream_);  // which the future's callbacks and waiters come after
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace zcomm::c10d_binding
