// zcomm._c10d: the torch.distributed side in Python.
#include "bind.hpp"

namespace zcomm::c10d_binding {

PYBIND11_MODULE(_c10d, module) {
  py::module_::import("torch.distributed");
  module.attr("torch_version") = ZCOMM_TORCH_VERSION;
  py::module_::import("zcomm._core");  // formats are its
  bind_options(module);
  bind_stats(module);
  bind_planned_calls(module);
  bind_process_group(module);
}

}  // namespace zcomm::c10d_binding
