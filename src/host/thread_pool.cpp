#include "host/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

// State of one run_tasks call. It lives on the caller's stack until `num_helpers`, guarded by the mutex, is 0.
struct Batch {
  std::int64_t num_tasks;
  void (*task)(const void* arg, std::int64_t i);
  const void* arg;
  std::atomic<std::int64_t> next{0};
  int num_helpers = 0;
  std::once_flag failed;
  std::exception_ptr exception;

  bool has_tasks() const { return next.load(std::memory_order_relaxed) < num_tasks; }

  void work() {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(arg, i);
    } catch (...) {
      next.store(num_tasks, std::memory_order_relaxed);
      std::call_once(failed, [this] { exception = std::current_exception(); });
    }
  }
};

class ThreadPool {
 public:
  void set_num_threads(int num_threads) {
    num_threads_.store(num_threads, std::memory_order_relaxed);
    const std::scoped_lock lock(mutex_);
    work_or_exit_.notify_all();
  }

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void run(Batch& batch) {
    {
      const std::scoped_lock lock(mutex_);
      start_workers();
      batches_.push_back(&batch);
    }
    work_or_exit_.notify_all();
    batch.work();
    std::unique_lock lock(mutex_);
    std::erase(batches_, &batch);
    helper_left_.wait(lock, [&] { return batch.num_helpers == 0; });
  }

 private:
  // Requires the mutex.
  void start_workers() {
    try {
      while (num_workers_ < num_threads() - 1) {
        std::thread([this] { help(); }).detach();
        ++num_workers_;
      }
    } catch (const std::system_error&) {  // out of threads: the callers do the work
    }
  }

  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = std::ranges::find_if(batches_, &Batch::has_tasks);
      if (num_workers_ > num_threads() - 1) {
        --num_workers_;
        return;
      }
      if (found == batches_.end()) {
        work_or_exit_.wait(lock);
        continue;
      }
      Batch& batch = **found;
      ++batch.num_helpers;
      lock.unlock();
      batch.work();
      lock.lock();
      if (--batch.num_helpers == 0) helper_left_.notify_all();
    }
  }

  std::atomic<int> num_threads_{1};
  std::mutex mutex_;
  std::condition_variable work_or_exit_;
  std::condition_variable helper_left_;
  std::vector<Batch*> batches_;
  int num_workers_ = 0;
};

// Storage that is never destroyed: workers may sleep in the pool until the process ends.
alignas(ThreadPool) std::byte pool_storage[sizeof(ThreadPool)];

ThreadPool& pool() {
  static ThreadPool* const instance = [] {
    auto* created = new (pool_storage) ThreadPool;
    // Gives a forked child a new pool: it has no workers, and one of them may have held the mutex.
    pthread_atfork(nullptr, nullptr, [] {
      const int num_threads = pool().num_threads();
      (new (pool_storage) ThreadPool)->set_num_threads(num_threads);
    });
    return created;
  }();
  return *instance;
}

}  // namespace

void run_tasks(std::int64_t num_tasks, void (*task)(const void* arg, std::int64_t i), const void* arg) {
  Batch batch{num_tasks, task, arg};
  pool().run(batch);
  if (batch.exception) std::rethrow_exception(batch.exception);
}

void set_num_threads(int num_threads) {
  check_argument(num_threads >= 1, "num_threads: expected 1 or more, got ", num_threads);
  pool().set_num_threads(num_threads);
}

int num_threads() { return pool().num_threads(); }

}  // namespace zcomm
