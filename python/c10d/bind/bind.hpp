// Bindings of zcomm._c10d: one function per concept.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace zcomm::c10d_binding {

namespace py = pybind11;

void bind_call_hooks(py::module_& module);
void bind_operations(py::module_& module);
void bind_shard_mark(py::module_& module);
void bind_process_group(py::module_& module);

}  // namespace zcomm::c10d_binding
