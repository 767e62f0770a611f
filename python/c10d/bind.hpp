// Bindings of zcomm._c10d: one function per concept.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <variant>
#include <vector>

namespace zcomm::c10d_binding {

namespace py = pybind11;

// Gathered, scattered or reduced tensor, or its parts: see Whole.
using TensorOrParts = std::variant<at::Tensor, std::vector<at::Tensor>>;
inline std::vector<at::Tensor> whole_of(TensorOrParts given) {
  if (auto* const parts = std::get_if<std::vector<at::Tensor>>(&given)) return std::move(*parts);
  return {std::get<at::Tensor>(std::move(given))};
}

void bind_options(py::module_& module);
void bind_operations(py::module_& module);
void bind_shard_mark(py::module_& module);
void bind_process_group(py::module_& module);

}  // namespace zcomm::c10d_binding
