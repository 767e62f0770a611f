// Texts of a group's errors, and the kind of the last one.
#pragma once

#include <atomic>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zcomm::c10d_binding {

class GroupErrors {
 public:
  // Borrows `group`.
  explicit GroupErrors(const ::c10d::Backend& group) : group_(group) {}

  // Converts `error` for the caller of a collective: torch's exception, with the rank, the group, and the place in the
  // program if known. A Python exception that is being handled stays as it is. Thread-safe.
  std::exception_ptr record(const std::exception& error, const std::string& place = {});
  ::c10d::ErrorType last() const { return last_; }

 private:
  const ::c10d::Backend& group_;
  std::atomic<::c10d::ErrorType> last_{::c10d::ErrorType::SUCCESS};
};

}  // namespace zcomm::c10d_binding
