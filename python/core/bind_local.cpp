// Ranks as threads of one process, in Python.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "zcomm/communicator.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

// (address, num_elements, dtype), as zcomm/codec.py makes them of arrays.
using Array = std::tuple<std::uintptr_t, std::int64_t, std::string>;

TensorView view_of(const Array& array) {
  const auto& [address, num_elements, dtype] = array;
  return {reinterpret_cast<std::byte*>(address), num_elements, parse_dtype(dtype)};
}

template <class View>
std::vector<View> views_of(const std::vector<Array>& arrays) {
  std::vector<View> views;
  for (const Array& array : arrays) views.push_back(view_of(array));
  return views;
}

std::vector<std::unique_ptr<Communicator>> make_local_communicators(const std::vector<int>& node_ids,
                                                                    std::size_t chunk_bytes) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(static_cast<int>(node_ids.size()))) {
    communicators.push_back(std::make_unique<Communicator>(std::move(transport), Topology(node_ids), make_cpu_codec(),
                                                           make_host_workspace(), chunk_bytes));
  }
  return communicators;
}

}  // namespace

void bind_local(py::module_& module) {
  using std::chrono::milliseconds;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<CallStats>(module, "CallStats")
      .def_readonly("inside_bytes", &CallStats::inside_bytes)
      .def_readonly("between_bytes", &CallStats::between_bytes);

  py::class_<Communicator>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def(
          "all_gather",
          [](Communicator& self, const Array& shard, const std::vector<Array>& slots, const std::string& format,
             milliseconds timeout) {
            return self.all_gather(view_of(shard), views_of<TensorView>(slots), BlockFormat::parse(format), timeout);
          },
          py::arg("shard"), py::arg("slots"), py::arg("format"), py::arg("timeout"), no_gil)
      .def(
          "reduce_scatter",
          [](Communicator& self, const std::vector<Array>& slots, const Array& output, const std::string& formats,
             float factor, milliseconds timeout) {
            return self.reduce_scatter(views_of<ConstTensorView>(slots), view_of(output), HopFormats::parse(formats),
                                       factor, timeout);
          },
          py::arg("slots"), py::arg("output"), py::arg("formats"), py::arg("factor"), py::arg("timeout"), no_gil)
      .def(
          "all_reduce",
          [](Communicator& self, const Array& tensor, const std::string& formats, float factor, milliseconds timeout) {
            return self.all_reduce(view_of(tensor), HopFormats::parse(formats), factor, timeout);
          },
          py::arg("tensor"), py::arg("formats"), py::arg("factor"), py::arg("timeout"), no_gil)
      .def("abort", &Communicator::abort, py::arg("reason"), no_gil);

  module.def("make_local_communicators", &make_local_communicators, py::arg("node_ids"), py::arg("chunk_bytes"));
  module.attr("DEFAULT_CHUNK_BYTES") = kDefaultChunkBytes;
}

}  // namespace zcomm
