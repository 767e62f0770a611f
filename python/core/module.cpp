// zcomm._core: formats, codecs and communicators, without torch. See zcomm/codec.py and zcomm/communicator.py for its
// use.
#include "bind.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  // The last registered is asked first: base classes come before derived ones.
  py::register_exception<zcomm::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<zcomm::ArgumentError>(module, "ArgumentError", PyExc_ValueError);
  py::register_exception<zcomm::TransportError>(module, "TransportError", PyExc_RuntimeError);
  py::register_exception<zcomm::TimeoutError>(module, "TimeoutError", module.attr("TransportError"));
  zcomm::bind_format(module);
  zcomm::bind_codec(module);
  zcomm::bind_difference(module);
  zcomm::bind_dlpack(module);
  zcomm::bind_cuda(module);
  zcomm::bind_communicator(module);
  zcomm::bind_local(module);
}
