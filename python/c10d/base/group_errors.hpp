// Errors of a group: their texts, the kind of the last one, and those that end the group.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

inline constexpr const char* kAborted = "because the group was aborted";
inline constexpr const char* kShutDown = "zcomm: the process group was shut down, or has other members now";

inline bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

// In Python zcomm.CorruptedWireError, which is a DistBackendError.
struct CorruptedWire final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override {
    return pybind11::module_::import("zcomm.distributed.errors").attr("CorruptedWireError").ptr();
  }
};

// Thread-safe. May outlive the group: callbacks of its transports do.
class GroupErrors {
 public:
  explicit GroupErrors(int rank) : rank_(rank) {}

  // Sets what announce() calls with the group's name and its first error. Called before the other functions.
  void on_first(std::function<void(const std::string& group, const std::string& error)> call) {
    on_first_ = std::move(call);
  }

  // Sets what errors call the group.
  void set_group_uid(const std::string& uid) {
    const std::lock_guard lock(mutex_);
    group_uid_ = uid;
  }

  // Converts `error` for the caller of a collective: torch's exception, with the rank, the group, and the place in the
  // program if known. A Python exception that is being handled stays as it is. So does a lack of memory: callers look
  // for torch's own type and text, and go on with a smaller batch. Where it has ended the group the next call tells.
  std::exception_ptr record(const std::exception& error, const std::string& place = {}) {
    if (dynamic_cast<const pybind11::error_already_set*>(&error) != nullptr || is_out_of_memory(error)) {
      return std::current_exception();
    }
    if (dynamic_cast<const CorruptedWireError*>(&error) != nullptr) ++num_corrupted_;
    const bool timed_out = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    last_ = timed_out ? ::c10d::ErrorType::TIMEOUT : ::c10d::ErrorType::COMM_ERROR;
    const std::lock_guard lock(mutex_);
    const std::string text = "zcomm, rank " + std::to_string(rank_) + " of group '" + group_uid_ + "'" +
                             (place.empty() ? "" : ", in " + place) + ": " + error.what();
    if (first_.empty()) first_ = text;
    if (std::string_view(error.what()).find(kCorrupted) != std::string::npos)
      return std::make_exception_ptr(CorruptedWire(text));
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text));
  }
  ::c10d::ErrorType last() const { return last_; }
  // Number of messages that this rank has received with other bytes than were sent.
  std::uint64_t num_corrupted() const { return num_corrupted_; }
  void count_corrupted(std::uint64_t before) { num_corrupted_ += before; }

  // Tells the first error to users, once. It may wait for Python's lock: call it without locks, when peers know.
  void announce() {
    std::unique_lock lock(mutex_);
    if (first_.empty() || !on_first_ || std::exchange(is_announced_, true)) return;
    const std::string group_uid = group_uid_, first = first_;
    lock.unlock();
    on_first_(group_uid, first);
  }

  // Sets the failure of transfers on a GPU whose calls have returned, with undefined results. The first one stays.
  void set_failure(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(error);
  }
  // Returns null if there is none.
  std::exception_ptr failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // Throws it, if any.
  void check() const {
    if (const std::exception_ptr error = failure()) std::rethrow_exception(error);
  }

  // Makes connections in progress, and later ones, stop.
  void set_aborted() {
    aborted_ = true;
    const std::lock_guard lock(mutex_);
    if (first_.empty()) first_ = "the group was aborted";
  }
  bool is_aborted() const { return aborted_; }

 private:
  const int rank_;
  std::function<void(const std::string&, const std::string&)> on_first_;
  std::atomic<::c10d::ErrorType> last_{::c10d::ErrorType::SUCCESS};
  std::atomic<bool> aborted_{false};
  std::atomic<std::uint64_t> num_corrupted_{0};
  mutable std::mutex mutex_;  // guards the next ones
  std::string group_uid_;
  std::string first_;  // error
  bool is_announced_ = false;
  std::exception_ptr failure_;
};

}  // namespace zcomm::c10d_binding
