#include "work_queue.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
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

struct WorkQueue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Task>> tasks;
  std::deque<std::unique_ptr<Task>> untold;  // tasks run inside of a callback, told after it ends
  bool running = false;                      // a task taken from `tasks` is running
  bool stopped = false;
  std::uint64_t num_pushed = 0;
  std::uint64_t num_done = 0;
  std::uint64_t num_told = 0;
  std::thread thread;  // started by the first task that needs it
  std::thread::id thread_id;
  const char* bottom = nullptr;        // of the thread's stack
  static thread_local State* telling;  // queue whose caller this thread is telling, if any

  // Runs the first task on this thread; returns it, to be told.
  std::unique_ptr<Task> run_one(std::unique_lock<std::mutex>& lock) {
    std::unique_ptr<Task> task = std::move(tasks.front());
    tasks.pop_front();
    running = true;
    lock.unlock();
    task->run();
    lock.lock();
    running = false;
    ++num_done;
    changed.notify_all();
    return task;
  }

  void tell(std::unique_ptr<Task> task, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    State* const outer = std::exchange(telling, this);
    task->tell();
    task.reset();
    telling = outer;
    lock.lock();
    ++num_told;
    changed.notify_all();
  }

  bool is_own_thread() const { return std::this_thread::get_id() == thread_id; }

  // Runs tasks on the queue's own thread, inside of a callback: nobody else would run the task that the callback waits
  // for.
  void run_inside_callback(std::unique_lock<std::mutex>& lock, std::uint64_t target) {
    while (num_done < target && !tasks.empty()) {
      changed.wait(lock, [this] { return !running; });
      if (!tasks.empty()) untold.push_back(run_one(lock));
    }
  }

  void tell_first(std::unique_lock<std::mutex>& lock) {
    std::unique_ptr<Task> task = std::move(untold.front());
    untold.pop_front();
    tell(std::move(task), lock);
  }

  void run_until_stopped() {
    std::unique_lock lock(mutex);
    bottom = stack_pointer();
    while (true) {
      changed.wait(lock, [this] { return !running && (stopped || !tasks.empty()); });
      if (tasks.empty()) return;
      tell(run_one(lock), lock);
      while (!untold.empty()) tell_first(lock);
    }
  }
};

thread_local WorkQueue::State* WorkQueue::State::telling = nullptr;

WorkQueue::WorkQueue() : state_(std::make_shared<State>()) {}

bool WorkQueue::push(std::unique_ptr<Task> task, bool here) {
  const std::shared_ptr<State> state = state_;
  const WithoutGil no_gil;
  std::unique_lock lock(state->mutex);
  if (state->stopped) return false;
  const bool idle = state->tasks.empty() && !state->running;
  state->tasks.push_back(std::move(task));
  const std::uint64_t number = ++state->num_pushed;
  if (here && idle) {
    state->tell(state->run_one(lock), lock);
  } else if (state->is_own_thread()) {
    // Leaves the task queued: the callback may wait for its work, but not for its future.
    if (state->bottom - stack_pointer() > kNestedBytes) return true;
    state->run_inside_callback(lock, number);
    std::unique_ptr<Task> own = std::move(state->untold.back());
    state->untold.pop_back();
    state->tell(std::move(own), lock);
  } else if (!state->thread.joinable()) {
    state->thread = std::thread([state] { state->run_until_stopped(); });
    state->thread_id = state->thread.get_id();
  }
  state->changed.notify_all();
  return true;
}

bool WorkQueue::advance_inside_callback(const void* id) {
  State* const state = State::telling;
  if (state == nullptr || state != id) return false;
  const WithoutGil no_gil;
  std::unique_lock lock(state->mutex);
  if (!state->is_own_thread()) return false;
  if (state->untold.empty()) state->run_inside_callback(lock, state->num_done + 1);
  if (state->untold.empty()) return false;
  state->tell_first(lock);
  return true;
}

bool WorkQueue::drain(std::chrono::milliseconds limit) {
  const std::shared_ptr<State> state = state_;
  const WithoutGil no_gil;
  std::unique_lock lock(state->mutex);
  const std::uint64_t target = state->num_pushed;
  if (state->is_own_thread()) state->run_inside_callback(lock, target);
  // Counts completion only, if the caller waits inside of a callback: it is being told just now.
  const std::uint64_t& reached = State::telling == state.get() ? state->num_done : state->num_told;
  return state->changed.wait_for(lock, limit, [&] { return reached >= target; });
}

void WorkQueue::stop() {
  const WithoutGil no_gil;
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    state_->changed.notify_all();
    thread = std::move(state_->thread);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

}  // namespace zcomm::c10d_binding
