// Python bindings of what this build and this machine support of CUDA and NCCL.
#include "bind.hpp"
#include "views.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/nccl.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

std::pair<std::string, int> open_nccl(const std::string& wheel_path) {
  const NcclLibrary& library = load_nccl(wheel_path);
  return {library.path, library.version};
}

}  // namespace

void bind_cuda(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<CudaBuild>(module, "CudaBuild")
      .def_readonly("toolkit", &CudaBuild::toolkit, "Such as 13.0; empty in a build without CUDA.")
      .def_readonly("targets", &CudaBuild::targets, "What the kernels are compiled for.");
  module.def("cuda_build", &cuda_build);
  module.def("cuda_device_count", &cuda_device_count, no_gil);
  module.def("load_nccl", &open_nccl, py::arg("wheel_path") = "", no_gil, "(path, version as ncclGetVersion has it)");
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

}  // namespace zcomm
