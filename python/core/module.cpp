// zcomm._core: formats, codecs and communicators, without torch. zcomm/codec.py and zcomm/communicator.py show its use.
#include "bind.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  // Registers base classes first: pybind11 tries the last registered translator first. Each exception also derives from
  // the Python exception that Python's own functions would raise.
  const auto bases = [&](const char* own, PyObject* of_python) {
    return py::make_tuple(module.attr(own), py::handle(of_python));
  };
  py::register_exception<zcomm::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<zcomm::ArgumentError>(module, "ArgumentError", bases("Error", PyExc_ValueError));
  py::register_exception<zcomm::TransportError>(module, "TransportError", module.attr("Error"));
  py::register_exception<zcomm::TimeoutError>(module, "TimeoutError", bases("TransportError", PyExc_TimeoutError));
  zcomm::bind_format(module);
  zcomm::bind_codec(module);
  zcomm::bind_dlpack(module);
  zcomm::bind_cuda(module);
  zcomm::bind_plan(module);
  zcomm::bind_communicator(module);
}
