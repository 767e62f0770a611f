// Python's global interpreter lock.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace zcomm::c10d_binding {

// Releases the lock for its lifetime: used around all waits for other threads, which may need the lock.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

}  // namespace zcomm::c10d_binding
