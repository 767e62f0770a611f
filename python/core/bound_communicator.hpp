// Owner of a communicator in Python.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "views.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/cuda.hpp"
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
    const Guard guard(device_);
    const std::shared_ptr<Communicator> communicator = living();
    check_argument(communicator != nullptr, [] { return std::string("this communicator is closed"); });
    return call(*communicator);
  }

  void abort(const std::string& reason) noexcept {
    if (const auto communicator = living()) communicator->abort(reason);
  }

  // Closes after any call that is in progress in another thread.
  void close() {
    std::shared_ptr<Communicator> last;
    {
      const std::lock_guard lock(mutex_);
      last = std::move(communicator_);
    }
    if (last == nullptr) return;
    const std::lock_guard no_call(calls_);
    const Guard guard(device_);
    last.reset();
  }

  bool is_closed() const { return living() == nullptr; }

  const World world;

 private:
  struct Guard {
    explicit Guard(int device) {
      if (device >= 0) current.emplace(device);
    }
    std::optional<CudaDeviceGuard> current;
  };

  std::shared_ptr<Communicator> living() const {
    const std::lock_guard lock(mutex_);
    return communicator_;
  }

  const int device_;
  std::mutex calls_;
  mutable std::mutex mutex_;  // guards the pointer
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace zcomm
