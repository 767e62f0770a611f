#include "host_runner.hpp"

#include <ATen/Parallel.h>

#include "work.hpp"

namespace zcomm::c10d_binding {

Communicator& HostRunner::communicator() {
  if (!communicator_) {
    auto fresh = connect_();
    const std::lock_guard lock(mutex_);
    communicator_ = std::move(fresh);
    if (!abort_reason_.empty()) communicator_->abort(abort_reason_);
  }
  return *communicator_;
}

c10::intrusive_ptr<::c10d::Work> HostRunner::launch(Job job) {
  auto work = c10::make_intrusive<HostWork>(job);
  set_num_threads(at::get_num_threads());
  // The task holds the group, so that no reference that a user drops can end it in the middle.
  WorkQueue::Task task = [this, owner = keep_alive_(), work, run = std::move(job.run)]() -> std::function<void()> {
    std::exception_ptr error;
    try {
      run(communicator(), {});
    } catch (const std::exception& caught) {
      error = on_error_(caught);
    }
    return [work, error] { work->complete(error); };
  };
  const bool queued = queue_.push(std::move(task), !job.async);
  TORCH_CHECK(queued, "zcomm: the process group was shut down");
  return work;
}

void HostRunner::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  abort_reason_ = reason;
  if (communicator_) communicator_->abort(reason);
}

}  // namespace zcomm::c10d_binding
