#include "python_hooks.hpp"

#include <torch/csrc/utils/pybind.h>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

void rethrow_from_python() {
  try {
    throw;
  } catch (pybind11::error_already_set& error) {
    const pybind11::gil_scoped_acquire gil;
    if (!error.matches(PyExc_Exception)) throw;          // Ctrl-C or exit
    throw TransportError(pybind11::str(error.value()));  // what() would append a traceback
  }
}

}  // namespace zcomm::c10d_binding
