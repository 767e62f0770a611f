#include "host_runner.hpp"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/record_function.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <thread>
#include <utility>

#include "gil.hpp"

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
      : Work(-1, its_job->type, its_job->async ? nullptr : its_job->title, its_job->inputs),
        runner(its_runner),
        group(BackendPtr::unsafe_reclaim_from_nonowning(&its_runner.group_)),
        job(std::move(its_job)),
        queue_(its_runner.queue_.get()),
        outputs_(job->outputs),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
        sequence_number_(job->sequence_number) {
    if (!job->async && at::hasCallbacks()) callers.emplace();
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
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

  HostRunner& runner;
  BackendPtr group;  // keeps the runner alive until the job has run if users drop their references
  JobPtr job;
  std::optional<at::ThreadLocalState> callers;  // with its profilers, if it waits, perhaps for another thread
  std::exception_ptr error;

 private:
  const Queue* queue_;  // which may be gone
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint64_t sequence_number_;
};

struct HostRunner::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<HostWork>> tasks;
  bool running = false;  // a task taken from `tasks` is running
  bool stopped = false;
  std::uint64_t num_pushed = 0;
  std::uint64_t num_done = 0;
  std::uint64_t num_told = 0;
  std::thread thread;  // started by the first task that needs it
  std::thread::id thread_id;
  const char* bottom = nullptr;        // of the thread's stack
  static thread_local Queue* telling;  // queue whose caller this thread is telling, if any

  // Runs the first task on this thread, and tells its caller. The queue is free then: the caller may use it, and wait.
  void run_one(std::unique_lock<std::mutex>& lock) {
    c10::intrusive_ptr<HostWork> task = std::move(tasks.front());
    tasks.pop_front();
    running = true;
    lock.unlock();
    {
      std::optional<at::ThreadLocalStateGuard> as_caller;
      if (task->callers) as_caller.emplace(*task->callers);
      try {
        task->job->run([&]() -> Communicator& { return task->runner.communicator(); }, {}, task->runner.errors_);
      } catch (const std::exception&) {
        task->error = std::current_exception();
      }
    }
    task->job.reset();
    task->callers.reset();
    task->group.reset();  // may be the last reference, and destroy the runner
    lock.lock();
    running = false;
    ++num_done;
    changed.notify_all();
    lock.unlock();
    Queue* const outer = std::exchange(telling, this);
    task->complete();
    task.reset();
    telling = outer;
    lock.lock();
    ++num_told;
    changed.notify_all();
  }

  bool is_own_thread() const { return std::this_thread::get_id() == thread_id; }

  // Runs tasks inside of a callback on the queue's own thread: nobody else would run what the callback waits for.
  void run_inside_callback(std::unique_lock<std::mutex>& lock, std::uint64_t target) {
    while (num_done < target && !tasks.empty()) {
      changed.wait(lock, [this] { return !running; });
      if (!tasks.empty()) run_one(lock);
    }
  }

  // Runs the next task of a `queue` so. Returns false and does nothing elsewhere, or without a task.
  static bool advance_inside_callback(const Queue* queue) {
    Queue* const own = telling;
    if (own == nullptr || own != queue) return false;
    const WithoutGil no_gil;
    std::unique_lock lock(own->mutex);
    if (!own->is_own_thread() || own->tasks.empty()) return false;
    own->run_inside_callback(lock, own->num_done + 1);
    return true;
  }

  void run_until_stopped() {
    std::unique_lock lock(mutex);
    bottom = stack_pointer();
    while (true) {
      changed.wait(lock, [this] { return !running && (stopped || !tasks.empty()); });
      if (tasks.empty()) return;
      run_one(lock);
    }
  }
};

thread_local HostRunner::Queue* HostRunner::Queue::telling = nullptr;

bool HostRunner::HostWork::wait(std::chrono::milliseconds timeout) {
  while (!isCompleted() && Queue::advance_inside_callback(queue_)) {
  }
  return Work::wait(timeout);
}

HostRunner::HostRunner(::c10d::Backend& group, std::function<std::unique_ptr<Communicator>()> connect,
                       GroupErrors& errors)
    : group_(group), connect_(std::move(connect)), errors_(errors), queue_(std::make_shared<Queue>()) {}

HostRunner::~HostRunner() {
  const WithoutGil no_gil;
  stop();
  communicator_.reset();  // its transport waits for threads, too
}

Communicator& HostRunner::communicator() {
  if (!communicator_) {
    auto fresh = connect_();
    const std::lock_guard lock(mutex_);
    communicator_ = std::move(fresh);
    if (errors_.is_aborted()) communicator_->abort(kAborted);
  }
  return *communicator_;
}

WorkPtr HostRunner::launch(JobPtr job) {
  const std::shared_ptr<Queue> queue = queue_;
  const bool here = !job->async;
  set_num_threads(at::get_num_threads());
  auto work = c10::make_intrusive<HostWork>(*this, std::move(job));
  const WithoutGil no_gil;
  std::unique_lock lock(queue->mutex);
  TORCH_CHECK(!queue->stopped, "zcomm: the process group was shut down");
  const bool idle = queue->tasks.empty() && !queue->running;
  queue->tasks.push_back(work);
  const std::uint64_t number = ++queue->num_pushed;
  if (here && idle) {
    queue->run_one(lock);
  } else if (queue->is_own_thread()) {
    // Leaves the task queued: the callback may wait for its work, but not for its future.
    if (queue->bottom - stack_pointer() > kNestedBytes) return work;
    queue->run_inside_callback(lock, number);
  } else if (!queue->thread.joinable()) {
    queue->thread = std::thread([queue] { queue->run_until_stopped(); });
    queue->thread_id = queue->thread.get_id();
  }
  queue->changed.notify_all();
  return work;
}

bool HostRunner::drain(std::chrono::milliseconds limit) {
  const std::shared_ptr<Queue> queue = queue_;
  const WithoutGil no_gil;
  std::unique_lock lock(queue->mutex);
  const std::uint64_t target = queue->num_pushed;
  if (queue->is_own_thread()) queue->run_inside_callback(lock, target);
  // Counts completion only, if the caller waits inside of a callback: it is being told just now.
  const std::uint64_t& reached = Queue::telling == queue.get() ? queue->num_done : queue->num_told;
  return queue->changed.wait_for(lock, limit, [&] { return reached >= target; });
}

void HostRunner::stop() {
  const WithoutGil no_gil;
  std::thread thread;
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->stopped = true;
    queue_->changed.notify_all();
    thread = std::move(queue_->thread);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void HostRunner::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (communicator_) communicator_->abort(kAborted);
}

}  // namespace zcomm::c10d_binding
