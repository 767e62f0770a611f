// The codecs, in Python. Memory comes as addresses: zcomm/arrays.py has looked at the arrays.
#include <pybind11/stl.h>

#include <optional>

#include "bind.hpp"
#include "views.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using WireTuple = std::tuple<std::uintptr_t, std::string, std::string>;  // address, format, dtype

Wire wire_of(const WireTuple& wire) {
  const auto& [address, format, dtype] = wire;
  return {reinterpret_cast<const std::byte*>(address), BlockFormat::parse(format), parse_dtype(dtype)};
}

std::vector<Wire> wires_of(const std::vector<WireTuple>& tuples) {
  std::vector<Wire> wires;
  for (const WireTuple& wire : tuples) wires.push_back(wire_of(wire));
  return wires;
}

// For the device that is current. It lives as long as the process: CUDA may be gone before static objects are.
const Codec& cuda_codec() {
  static auto& workspace = *make_cuda_workspace().release();
  static auto& codec = *make_cuda_codec(workspace).release();
  return codec;
}

// Calls body(codec, stream) with the codec for the memory of `device`: a GPU's index, kHost or kCurrentDevice.
template <class Body>
void on_device(int device, std::uintptr_t stream, const std::string& isa, Body&& body) {
  if (device == kHost) return body(*make_cpu_codec(isa), StreamView{});
  std::optional<CudaDeviceGuard> guard;
  if (device != kCurrentDevice) guard.emplace(device);
  body(cuda_codec(), stream_of(stream));
}

void encode(const ArrayTuple& values, const std::string& format, std::uintptr_t wire, const std::string& isa,
            int device, std::uintptr_t stream) {
  const Encode job{view_of(values), BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.encode({&job, 1}, queue); });
}

void decode(const WireTuple& wire, const ArrayTuple& values, const std::string& isa, int device,
            std::uintptr_t stream) {
  const Decode job{wire_of(wire), view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode({&job, 1}, queue); });
}

void decode_sum(const std::vector<WireTuple>& wires, float factor, const ArrayTuple& values, const std::string& isa,
                int device, std::uintptr_t stream) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSum job{sources, factor, view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode_sum({&job, 1}, queue); });
}

void decode_sum_encode(const std::vector<WireTuple>& wires, std::int64_t num_elements, const std::string& format,
                       std::uintptr_t wire, const std::string& isa, int device, std::uintptr_t stream) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSumEncode job{sources, num_elements, BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire)};
  on_device(device, stream, isa,
            [&](const Codec& codec, StreamView queue) { codec.decode_sum_encode({&job, 1}, queue); });
}

}  // namespace

void bind_codec(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto define = [&](const char* name, auto* function, auto... arguments) {
    module.def(name, function, arguments..., py::arg("isa") = "", py::arg("device") = kHost, py::arg("stream") = 0,
               no_gil);
  };
  define("encode", &encode, py::arg("values"), py::arg("format"), py::arg("wire"));
  define("decode", &decode, py::arg("wire"), py::arg("values"));
  define("decode_sum", &decode_sum, py::arg("wires"), py::arg("factor"), py::arg("values"));
  define("decode_sum_encode", &decode_sum_encode, py::arg("wires"), py::arg("num_elements"), py::arg("format"),
         py::arg("wire"));
  module.def("cpu_isas", &cpu_isas);
  module.def("set_num_threads", &set_num_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
}

}  // namespace zcomm
