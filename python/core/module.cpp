// zcomm._core: formats, codecs and communicators, without torch. zcomm/codec.py and zcomm/communicator.py show its use.
#include "bind.hpp"
#include "zcomm/block_format.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"
#include "zcomm/wire_layout.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

void bind_errors(py::module_& module) {
  // Registers base classes first: pybind11 tries the last registered translator first. Each exception also derives from
  // the Python exception that Python's own functions would raise.
  const auto bases = [&](const char* own, PyObject* of_python) {
    return py::make_tuple(module.attr(own), py::handle(of_python));
  };
  py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<ArgumentError>(module, "ArgumentError", bases("Error", PyExc_ValueError));
  py::register_exception<TransportError>(module, "TransportError", module.attr("Error"));
  py::register_exception<TimeoutError>(module, "TimeoutError", bases("TransportError", PyExc_TimeoutError));
}

template <class Format>
py::class_<Format> bind_text(py::module_& module, const char* name) {
  return py::class_<Format>(module, name)
      .def(py::init(&Format::parse), py::arg("text"))
      .def("__str__", &Format::to_string)
      .def("__repr__", [name](const Format& self) { return std::string(name) + "('" + self.to_string() + "')"; })
      .def("__hash__", [](const Format& self) { return py::hash(py::str(self.to_string())); })
      .def("__eq__", [](const Format& self, const Format& other) { return self == other; }, py::is_operator());
}

void bind_format(py::module_& module) {
  bind_text<BlockFormat>(module, "BlockFormat")
      .def_readonly("block_size", &BlockFormat::block_size,
                    "Elements that share a scale; 0 where there are no scales.");
  bind_text<HopFormats>(module, "HopFormats")
      .def_readonly("intra_node", &HopFormats::intra_node)
      .def_readonly("inter_node", &HopFormats::inter_node);

  py::list kinds;  // name, whether blocks have scales
  for (const ElementTraits& kind : all_traits()) kinds.append(py::make_tuple(kind.name, kind.max_code != 0));
  module.attr("ELEMENT_KINDS") = py::tuple(kinds);

  py::class_<WireLayout>(module, "WireLayout", "Where the parts of a wire lie, in bytes.")
      .def(py::init([](const std::string& format, const std::string& dtype, std::int64_t num_elements) {
             return WireLayout(BlockFormat::parse(format), parse_dtype(dtype), num_elements);
           }),
           py::arg("format"), py::arg("dtype"), py::arg("num_elements"))
      .def_readonly("num_blocks", &WireLayout::num_blocks)
      .def_readonly("codes_offset", &WireLayout::codes_offset)
      .def_readonly("codes_bytes", &WireLayout::codes_bytes)
      .def_readonly("num_bytes", &WireLayout::num_bytes);
}

// Binds what this build and this machine support of CUDA and NCCL.
void bind_cuda(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("cuda_toolkit", &cuda_toolkit, "Such as 13.0; empty in a build without CUDA.");
  module.def("cuda_targets", &cuda_targets, "What the kernels are compiled for.");
  module.def("cuda_device_count", &cuda_device_count, no_gil);
  module.def("load_nccl", &load_nccl, py::arg("wheel_path") = "", no_gil, "(path, version as ncclGetVersion has it)");
  module.def(
      "wait_for",
      [](std::uintptr_t stream, std::uintptr_t earlier, int device) {
        const auto on_device = make_current(device);
        wait_for(stream_of(stream), stream_of(earlier));
      },
      py::arg("stream"), py::arg("earlier"), py::arg("device"), no_gil,
      "Make a stream wait for another one of `device`; of the current one if that is negative.");
  module.def("synchronize", [](std::uintptr_t stream) { synchronize(stream_of(stream)); }, py::arg("stream"), no_gil);
}

}  // namespace
}  // namespace zcomm

PYBIND11_MODULE(_core, module) {
  zcomm::bind_errors(module);
  zcomm::bind_format(module);
  zcomm::bind_codec(module);
  zcomm::bind_dlpack(module);
  zcomm::bind_cuda(module);
  zcomm::bind_plan(module);
  zcomm::bind_communicator(module);
}
