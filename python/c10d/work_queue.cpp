#include "work_queue.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "gil.hpp"

namespace zcomm::c10d_binding {

struct WorkQueue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Task>> tasks;
  bool running = false;  // a task, taken from `tasks`
  bool stopped = false;
  std::uint64_t num_pushed = 0;
  std::uint64_t num_done = 0;
  std::uint64_t num_told = 0;
  std::thread thread;  // started by the first task that needs it
  std::thread::id thread_id;
  static thread_local const State* telling;  // the queue, if any, whose caller this thread is just telling

  // Runs the first task on this thread.
  void run_one(std::unique_lock<std::mutex>& lock) {
    std::unique_ptr<Task> task = std::move(tasks.front());
    tasks.pop_front();
    running = true;
    lock.unlock();
    task->run();
    lock.lock();
    running = false;
    ++num_done;
    changed.notify_all();
    lock.unlock();
    const State* const outer = std::exchange(telling, this);
    task->tell();
    task.reset();
    telling = outer;
    lock.lock();
    ++num_told;
    changed.notify_all();
  }

  // On the queue's own thread, inside of a callback: nobody else would run what the callback is about to wait for.
  void run_all_if_own_thread(std::unique_lock<std::mutex>& lock) {
    if (std::this_thread::get_id() != thread_id) return;
    while (!tasks.empty()) {
      changed.wait(lock, [this] { return !running; });
      if (!tasks.empty()) run_one(lock);
    }
  }

  void run_until_stopped() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !running && (stopped || !tasks.empty()); });
      if (tasks.empty()) return;
      run_one(lock);
    }
  }
};

thread_local const WorkQueue::State* WorkQueue::State::telling = nullptr;

WorkQueue::WorkQueue() : state_(std::make_shared<State>()) {}

bool WorkQueue::push(std::unique_ptr<Task> task, bool here) {
  const std::shared_ptr<State> state = state_;
  const WithoutGil no_gil;
  std::unique_lock lock(state->mutex);
  if (state->stopped) return false;
  const bool idle = state->tasks.empty() && !state->running;
  state->tasks.push_back(std::move(task));
  ++state->num_pushed;
  if (here && idle) {
    state->run_one(lock);
  } else if (!state->thread.joinable()) {
    state->thread = std::thread([state] { state->run_until_stopped(); });
    state->thread_id = state->thread.get_id();
  }
  state->run_all_if_own_thread(lock);
  state->changed.notify_all();
  return true;
}

bool WorkQueue::drain(std::chrono::milliseconds limit) {
  const std::shared_ptr<State> state = state_;
  const WithoutGil no_gil;
  std::unique_lock lock(state->mutex);
  state->run_all_if_own_thread(lock);
  const std::uint64_t target = state->num_pushed;
  // A caller that is being told waits here in a callback: it is not told yet.
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
