// Owner of a communicator in Python.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "views.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

// Communicator for one call at a time, with its GPU current, until it is closed. Methods run without the GIL.
class BoundCommunicator {
 public:
  // Takes a GPU's index or kHost as `device`.
  BoundCommunicator(std::unique_ptr<Communicator> communicator, int device)
      : world(communicator->world()), device_(device), communicator_(std::move(communicator)) {}

  ~BoundCommunicator() {
    try {
      close();
    } catch (const std::exception&) {  // its GPU is gone
    }
  }

  template <class Call>
  auto run(Call&& call) {
    const std::lock_guard one_at_a_time(calls_);
    const auto guard = make_current(device_);
    check_argument(!is_closed_, [] { return std::string("this communicator is closed"); });
    return call(*communicator_);
  }

  // Also ends a close() that waits.
  void abort(const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (communicator_ != nullptr) communicator_->abort(reason);
  }

  // Closes after any call that is in progress in another thread.
  void close() {
    is_closed_ = true;
    const std::lock_guard no_call(calls_);
    if (communicator_ == nullptr) return;
    const auto guard = make_current(device_);
    communicator_->finish();
    std::unique_ptr<Communicator> last;
    {
      const std::lock_guard lock(mutex_);
      last = std::move(communicator_);
    }
  }

  bool is_closed() const { return is_closed_; }

  const World world;

 private:
  const int device_;
  std::atomic<bool> is_closed_{false};
  std::mutex calls_;
  std::mutex mutex_;  // guards the pointer against abort(); changes need calls_, too
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace zcomm
