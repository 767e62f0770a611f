// Texts of a group's errors, and the kind of the last one.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

class GroupErrors {
 public:
  // Borrows `group`.
  explicit GroupErrors(const ::c10d::Backend& group) : group_(group) {}

  // Converts `error` for the caller of a collective: torch's exception, with the rank, the group, and the place in the
  // program if known. A Python exception that is being handled stays as it is. Thread-safe.
  std::exception_ptr record(const std::exception& error, const std::string& place = {}) {
    if (dynamic_cast<const pybind11::error_already_set*>(&error) != nullptr) return std::current_exception();
    const bool timed_out = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    last_ = timed_out ? ::c10d::ErrorType::TIMEOUT : ::c10d::ErrorType::COMM_ERROR;
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                              "zcomm, rank " + std::to_string(group_.getRank()) + " of group '" + group_.getGroupUid() +
                                  "'" + (place.empty() ? "" : ", in " + place) + ": " + error.what()));
  }
  ::c10d::ErrorType last() const { return last_; }

 private:
  const ::c10d::Backend& group_;
  std::atomic<::c10d::ErrorType> last_{::c10d::ErrorType::SUCCESS};
};

}  // namespace zcomm::c10d_binding
