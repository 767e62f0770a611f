// zcomm._c10d: Python bindings of the torch.distributed backend.
#include "bind.hpp"

namespace zcomm::c10d_binding {

PYBIND11_MODULE(_c10d, module) {
  py::module_::import("torch.distributed");
  py::module_::import("zcomm._core");  // registers formats
  bind_options(module);
  bind_operations(module);
  bind_shard_mark(module);
  bind_process_group(module);
}

}  // namespace zcomm::c10d_binding
