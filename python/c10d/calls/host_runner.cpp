#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/record_function.h>

#include <utility>

#include "c10d/base/python_hooks.hpp"
#include "runners.hpp"

namespace zcomm::c10d_binding {
namespace {

// Bound of the stack that nested callbacks may use: a chain of callbacks that each start a call has no end. Deeper
// calls are queued; a callback there may wait for their works, but not for their futures.
constexpr std::ptrdiff_t kNestedBytes = 64 << 10;

const char* stack_pointer() { return static_cast<const char*>(__builtin_frame_address(0)); }

}  // namespace

// Work of a job. Holds its inputs until it has run, and its outputs.
class HostRunner::HostWork final : public ::c10d::Work {
 public:
  // Records no range for an asynchronous job: it would end after the profiler may have stopped and freed its memory.
  HostWork(HostRunner& its_runner, JobPtr its_job)
      : Work(-1, its_job->type, its_job->settings.async ? nullptr : its_job->title(), its_job->inputs),
        runner(&its_runner),
        group(BackendPtr::unsafe_reclaim_from_nonowning(&its_runner.group_)),
        job(std::move(its_job)),
        outputs_(job->outputs),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
        sequence_number_(job->sequence_number) {
    if (!job->settings.async && at::hasCallbacks()) callers.emplace();
  }

  // Marks the work as done, or as failed.
  void complete() {
    finish(error);  // first: callbacks of the future may query this work
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

  // Runs the job itself inside of a callback, where no other thread may be able to.
  bool wait(std::chrono::milliseconds timeout) override;
  // The future is done after the work itself, and callers may ask for its value next.
  bool isCompleted() override { return future_->completed(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

  HostRunner* const runner;  // which may be gone after the job has run
  BackendPtr group;          // until then, even if users drop their references
  JobPtr job;
  std::optional<at::ThreadLocalState> callers;  // with its profilers, if it waits, perhaps for another thread
  std::exception_ptr error;

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint64_t sequence_number_;
};

thread_local HostRunner* HostRunner::telling_ = nullptr;

// Inside of a callback on the runner's own thread, nobody else would run what the callback waits for.
bool HostRunner::HostWork::wait(std::chrono::milliseconds timeout) {
  while (telling_ == runner && !isCompleted()) {
    const WithoutGil no_gil;
    Lock lock(runner->mutex_);
    if (!runner->is_own_thread() || runner->tasks_.empty()) break;
    runner->run_inside_callback(lock, runner->num_done_ + 1);
  }
  try {
    Work::wait(timeout);
  } catch (const std::exception&) {
    if (Work::isCompleted()) future_->wait();
    throw;
  }
  future_->wait();
  return true;
}

// Runs the first task on this thread, and tells its caller. The queue is free then: the caller may use it, and wait.
void HostRunner::run_one(Lock& lock) {
  c10::intrusive_ptr<HostWork> task = std::move(tasks_.front());
  tasks_.pop_front();
  running_ = true;
  lock.unlock();
  {
    std::optional<at::ThreadLocalStateGuard> as_caller;
    if (task->callers) as_caller.emplace(*task->callers);
    try {
      task->job->run([this]() -> Communicator& { return communicator(); }, {}, errors_);
    } catch (const std::exception&) {
      task->error = std::current_exception();
    }
  }
  task->job.reset();
  task->callers.reset();
  task->group.reset();  // may be the last reference
  lock.lock();
  running_ = false;
  ++num_done_;
  changed_.notify_all();
  lock.unlock();
  HostRunner* const outer = std::exchange(telling_, this);
  task->complete();
  task.reset();
  telling_ = outer;
  lock.lock();
  ++num_told_;
  changed_.notify_all();
}

// Runs tasks inside of a callback on the runner's own thread.
void HostRunner::run_inside_callback(Lock& lock, std::uint64_t target) {
  while (num_done_ < target && !tasks_.empty()) {
    changed_.wait(lock, [this] { return !running_; });
    if (!tasks_.empty()) run_one(lock);
  }
}

void HostRunner::run_until_stopped() {
  Lock lock(mutex_);
  bottom_ = stack_pointer();
  while (true) {
    changed_.wait(lock, [this] { return !running_ && (stopped_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    run_one(lock);
  }
}

HostRunner::HostRunner(::c10d::Backend& group, std::function<std::unique_ptr<Communicator>()> connect,
                       GroupErrors& errors)
    : group_(group), connect_(std::move(connect)), errors_(errors) {}

HostRunner::~HostRunner() = default;

Communicator& HostRunner::communicator() {
  if (!communicator_) {
    auto fresh = connect_();
    const std::lock_guard lock(communicator_mutex_);
    communicator_ = std::move(fresh);
    if (errors_.is_aborted()) communicator_->abort(kAborted);
  }
  return *communicator_;
}

WorkPtr HostRunner::launch(JobPtr job) {
  const std::shared_ptr<HostRunner> self = shared_from_this();
  const bool here = !job->settings.async;
  set_num_threads(at::get_num_threads());
  auto work = c10::make_intrusive<HostWork>(*this, std::move(job));
  const WithoutGil no_gil;
  Lock lock(mutex_);
  TORCH_CHECK(!stopped_, kShutDown);
  const bool idle = tasks_.empty() && !running_;
  tasks_.push_back(work);
  const std::uint64_t number = ++num_pushed_;
  if (here && idle) {
    run_one(lock);
  } else if (is_own_thread()) {
    // Leaves the task queued: the callback may wait for its work, but not for its future.
    if (bottom_ - stack_pointer() > kNestedBytes) return work;
    run_inside_callback(lock, number);
  } else if (!thread_.joinable()) {
    thread_ = std::thread([self] { self->run_until_stopped(); });
    thread_id_ = thread_.get_id();
  }
  changed_.notify_all();
  return work;
}

bool HostRunner::drain(std::chrono::milliseconds limit) {
  const std::shared_ptr<HostRunner> self = shared_from_this();
  const WithoutGil no_gil;
  Lock lock(mutex_);
  const std::uint64_t target = num_pushed_;
  if (is_own_thread()) run_inside_callback(lock, target);
  // Counts completion only, if the caller waits inside of a callback: it is being told just now.
  const std::uint64_t& reached = telling_ == this ? num_done_ : num_told_;
  return changed_.wait_for(lock, limit, [&] { return reached >= target; });
}

void HostRunner::stop() {
  const WithoutGil no_gil;
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void HostRunner::leave_group() {
  const WithoutGil no_gil;
  stop();
  communicator_.reset();  // its transport waits for threads, too
}

void HostRunner::abort() noexcept {
  const std::lock_guard lock(communicator_mutex_);
  if (communicator_) communicator_->abort(kAborted);
}

}  // namespace zcomm::c10d_binding
