// One function per concept of the Python module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace zcomm::c10d_binding {

namespace py = pybind11;

void bind_options(py::module_& module);
void bind_stats(py::module_& module);
void bind_planned_calls(py::module_& module);
void bind_process_group(py::module_& module);

}  // namespace zcomm::c10d_binding
