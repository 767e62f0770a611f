// Python bindings of communicators whose ranks are threads of one process.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "bound_communicator.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

std::vector<std::shared_ptr<BoundCommunicator>> make_local_communicators(const std::vector<int>& node_ids,
                                                                         std::size_t chunk_bytes) {
  std::vector<std::shared_ptr<BoundCommunicator>> communicators;
  for (auto& transport : make_local_transports(static_cast<int>(node_ids.size()))) {
    communicators.push_back(std::make_shared<BoundCommunicator>(
        std::make_unique<Communicator>(std::move(transport), Topology(node_ids), make_cpu_codec(),
                                       make_host_workspace(), chunk_bytes),
        kHost));
  }
  return communicators;
}

}  // namespace

void bind_local(py::module_& module) {
  module.def("make_local_communicators", &make_local_communicators, py::arg("node_ids"), py::arg("chunk_bytes"));
}

}  // namespace zcomm
