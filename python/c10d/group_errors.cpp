#include "group_errors.hpp"

#include <torch/csrc/utils/pybind.h>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

std::exception_ptr GroupErrors::record(const std::exception& error, const std::string& place) {
  if (dynamic_cast<const pybind11::error_already_set*>(&error) != nullptr) return std::current_exception();
  const bool timed_out = dynamic_cast<const TimeoutError*>(&error) != nullptr;
  last_ = timed_out ? ::c10d::ErrorType::TIMEOUT : ::c10d::ErrorType::COMM_ERROR;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                            "zcomm, rank " + std::to_string(group_.getRank()) + " of group '" + group_.getGroupUid() +
                                "'" + (place.empty() ? "" : ", in " + place) + ": " + error.what()));
}

}  // namespace zcomm::c10d_binding
