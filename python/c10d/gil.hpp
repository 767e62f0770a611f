// Python's lock.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace zcomm::c10d_binding {

// While it lives this thread does not hold Python's lock: around all that waits for another thread, which may need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

}  // namespace zcomm::c10d_binding
