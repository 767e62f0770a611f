#include "work_queue.hpp"

#include <torch/csrc/utils/pybind.h>

namespace zcomm::c10d_binding {

void without_gil(const std::function<void()>& body) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release release;
    body();
  } else {
    body();
  }
}

bool WorkQueue::push(std::function<void()> task, bool here) {
  std::unique_lock lock(mutex_);
  if (stopped_) return false;
  if (here && idle()) {
    running_ = true;
    lock.unlock();
    task();
    lock.lock();
    running_ = false;
  } else {
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
  return true;
}

bool WorkQueue::drain(std::chrono::milliseconds limit) {
  bool drained = false;
  without_gil([&] {
    std::unique_lock lock(mutex_);
    drained = changed_.wait_for(lock, limit, [this] { return idle(); });
  });
  return drained;
}

void WorkQueue::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // the last reference to the group was held by its own last task
    return;
  }
  without_gil([&] { thread.join(); });
}

void WorkQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !running_ && (stopped_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    running_ = true;
    lock.unlock();
    task();
    task = nullptr;  // its captures go before anybody hears that it is done
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

}  // namespace zcomm::c10d_binding
