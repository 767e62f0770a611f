// How the errors of a group read, and the kind of the last one.
#pragma once

#include <atomic>
#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zcomm::c10d_binding {

class GroupErrors {
 public:
  // Of `group`, which outlives this.
  explicit GroupErrors(const ::c10d::Backend& group) : group_(group) {}

  // What the caller of a collective gets for `error`: torch's exception, with the rank and the group. Any thread.
  std::exception_ptr record(const std::exception& error);
  ::c10d::ErrorType last() const { return last_; }

 private:
  const ::c10d::Backend& group_;
  std::atomic<::c10d::ErrorType> last_{::c10d::ErrorType::SUCCESS};
};

}  // namespace zcomm::c10d_binding
