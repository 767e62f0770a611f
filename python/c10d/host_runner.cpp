#include "host_runner.hpp"

#include <ATen/Parallel.h>

#include "flight_recorder.hpp"
#include "gil.hpp"
#include "host_work.hpp"
#include "profiling.hpp"

namespace zcomm::c10d_binding {

class HostRunner::Task final : public WorkQueue::Task {
 public:
  Task(HostRunner& runner, JobPtr job)
      : runner_(runner),
        owner_(runner.keep_alive_()),
        job_(std::move(job)),
        profilers_(job_->async ? std::nullopt : current_profilers()),
        work_(c10::make_intrusive<HostWork>(*job_, runner.queue_.id())) {}

  void run() override {
    const WithProfilers callers(profilers_);
    try {
      job_->run(runner_.communicator(), {});
    } catch (const std::exception& caught) {
      error_ = runner_.errors_.record(caught, job_->place());
    }
    FlightRecorder::of_process().end(job_->record, error_ != nullptr);
    job_.reset();
    owner_.reset();  // may be the last reference, and destroy the runner
  }
  void tell() override { work_->complete(error_); }

  const c10::intrusive_ptr<HostWork>& work() const { return work_; }

 private:
  HostRunner& runner_;
  c10::intrusive_ptr<c10::intrusive_ptr_target> owner_;  // keeps the owner alive if users drop their references
  JobPtr job_;
  const std::optional<Profilers> profilers_;  // of the caller, if it waits, perhaps on another thread
  c10::intrusive_ptr<HostWork> work_;
  std::exception_ptr error_;
};

HostRunner::~HostRunner() {
  const WithoutGil no_gil;
  queue_.stop();
  communicator_.reset();  // its transport waits for threads, too
}

Communicator& HostRunner::communicator() {
  if (!communicator_) {
    auto fresh = connect_();
    const std::lock_guard lock(mutex_);
    communicator_ = std::move(fresh);
    if (!abort_reason_.empty()) communicator_->abort(abort_reason_);
  }
  return *communicator_;
}

WorkPtr HostRunner::launch(JobPtr job) {
  const bool here = !job->async;
  set_num_threads(at::get_num_threads());
  auto task = std::make_unique<Task>(*this, std::move(job));
  WorkPtr work = task->work();
  TORCH_CHECK(queue_.push(std::move(task), here), "zcomm: the process group was shut down");
  return work;
}

void HostRunner::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  abort_reason_ = reason;
  if (communicator_) communicator_->abort(reason);
}

}  // namespace zcomm::c10d_binding
