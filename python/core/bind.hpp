// Bindings of zcomm._core, the torch-free module: one function per source.
#pragma once

#include <pybind11/pybind11.h>

namespace zcomm {

void bind_codec(pybind11::module_& module);
void bind_dlpack(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);

}  // namespace zcomm
