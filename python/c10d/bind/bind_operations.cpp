// Python bindings of operations.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "c10d/calls/operations.hpp"

namespace zcomm::c10d_binding {
namespace {

// Returns pairs of a number of elements and a format's name. Exact ones side by side are one, as in states of error
// feedback.
NamedSegments named_segments(const PlannedOperation& planned) {
  NamedSegments all;
  bool after_exact = false;
  for (const auto& [num_elements, format] : planned.operation->segments()) {
    if (format.is_exact() && after_exact) {
      all.back().first += num_elements;
    } else {
      all.emplace_back(num_elements, format.to_string());
    }
    after_exact = format.is_exact();
  }
  return all;
}

// Returns the bytes of a call that sends something of this rank; none if the values decide.
template <std::size_t LinkBytes::* link>
std::optional<std::size_t> bytes_on(const PlannedOperation& planned) {
  const ConstTensorView any;
  const std::optional<LinkBytes> bytes = planned.operation->bytes({{&any, 1}});
  if (!bytes) return std::nullopt;
  return (*bytes).*link;
}

template <std::size_t OperationMemory::* part>
std::size_t memory_of(const PlannedOperation& planned) {
  return planned.operation->memory().*part;
}

// Returns the same operation, bound to memory that calls check.
PlannedPtr bound_to(const PlannedOperation& planned, at::Tensor data) {
  auto bound = std::make_shared<PlannedOperation>(planned);
  bound->secondary = std::make_shared<TensorSecondaryShard>();
  bound->secondary->hold(std::move(data));
  bound->operation = gather_of(planned).bound_to(bound->secondary);
  return bound;
}

}  // namespace

void bind_operations(py::module_& module) {
  py::class_<PlannedOperation, PlannedPtr>(module, "Operation")
      .def_property_readonly("description", [](const PlannedOperation& p) { return p.operation->description(); })
      .def_property_readonly("ranks",
                             [](const PlannedOperation& p) { return p.operation->world().topology.to_string(); })
      .def_property_readonly("format", [](const PlannedOperation& p) { return p.format.to_string(); })
      .def_property_readonly("segments", &named_segments)
      .def_property_readonly("intra_node_bytes", &bytes_on<&LinkBytes::intra_node>)
      .def_property_readonly("inter_node_bytes", &bytes_on<&LinkBytes::inter_node>)
      .def_property_readonly("secondary_bytes", &memory_of<&OperationMemory::secondary>)
      .def_property_readonly("largest_secondary_bytes", &memory_of<&OperationMemory::largest_secondary>)
      .def_property_readonly("wires_bytes", &memory_of<&OperationMemory::wires>)
      .def_property_readonly("residual_bytes", &memory_of<&OperationMemory::residual>)
      .def_property_readonly("secondary",
                             [](const PlannedOperation& p) { return p.secondary ? p.secondary->data : at::Tensor(); })
      .def_property_readonly("generation",
                             [](const PlannedOperation& p) { return p.secondary ? p.secondary->generation.load() : 0; })
      .def_property_readonly("sent_bytes",
                             [](const PlannedOperation& p) { return p.secondary ? p.secondary->sent_bytes.load() : 0; })
      .def("bound_to", &bound_to, py::arg("data"))
      .def("run", &run, py::arg("output"), py::arg("input") = py::none(), py::arg("op") = py::none(), py::kw_only(),
           py::arg("residual") = py::none(), py::arg("site") = py::none(), py::arg("async_op") = false,
           py::arg("wires") = py::none(), py::call_guard<py::gil_scoped_release>())
      .def("decode", &decode, py::arg("output"), py::arg("wires"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace zcomm::c10d_binding
