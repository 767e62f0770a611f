// Python bindings of the codecs. Memory comes as addresses: zcomm/_arrays.py has checked the arrays.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "gpu_codec.hpp"
#include "views.hpp"
#include "zcomm/codec.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using WireTuple = std::tuple<std::uintptr_t, std::string, std::string>;  // address, format, dtype

using TermTuple = std::tuple<std::uintptr_t, std::string, std::string, float>;  // and the wire's factor

Wire wire_of(std::uintptr_t address, const std::string& format, const std::string& dtype, float factor = 1.0f) {
  return {reinterpret_cast<const std::byte*>(address), BlockFormat::parse(format), parse_dtype(dtype), factor};
}

std::vector<Wire> wires_of(const std::vector<TermTuple>& tuples) {
  std::vector<Wire> wires;
  for (const auto& [address, format, dtype, factor] : tuples) wires.push_back(wire_of(address, format, dtype, factor));
  return wires;
}

// Calls body(codec, stream) with the codec for `device`: a GPU's index, kHost or kCurrentDevice.
template <class Body>
void on_device(int device, std::uintptr_t stream, const std::string& isa, Body&& body) {
  if (device == kHost) return body(*make_cpu_codec(isa), StreamView{});
  on_gpu(device, stream, std::forward<Body>(body));
}

void encode(const ArrayTuple& values, const std::string& format, std::uintptr_t wire, const std::string& isa,
            int device, std::uintptr_t stream, std::uint64_t seed, std::int64_t first_element) {
  const Encode job{
      view_of(values), BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire), {seed, first_element}};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.encode({&job, 1}, queue); });
}

void decode(const WireTuple& wire, const ArrayTuple& values, const std::string& isa, int device,
            std::uintptr_t stream) {
  const auto& [address, format, dtype] = wire;
  const Decode job{wire_of(address, format, dtype), view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode({&job, 1}, queue); });
}

void decode_sum(const std::vector<TermTuple>& wires, float factor, const ArrayTuple& values, const std::string& isa,
                int device, std::uintptr_t stream) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSum job{sources, factor, view_of(values)};
  on_device(device, stream, isa, [&](const Codec& codec, StreamView queue) { codec.decode_sum({&job, 1}, queue); });
}

void decode_sum_encode(const std::vector<TermTuple>& wires, std::int64_t num_elements, const std::string& format,
                       std::uintptr_t wire, const std::string& isa, int device, std::uintptr_t stream,
                       std::uint64_t seed, std::int64_t first_element) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSumEncode job{
      sources, num_elements, BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire), {seed, first_element}};
  on_device(device, stream, isa,
            [&](const Codec& codec, StreamView queue) { codec.decode_sum_encode({&job, 1}, queue); });
}

}  // namespace

void bind_codec(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto isa = py::arg("isa") = "";
  const auto device = py::arg("device") = kHost;
  const auto stream = py::arg("stream") = 0;
  const auto seed = py::arg("seed") = 0;
  const auto first_element = py::arg("first_element") = 0;
  module.def("encode", &encode, py::arg("values"), py::arg("format"), py::arg("wire"), isa, device, stream, seed,
             first_element, no_gil);
  module.def("decode", &decode, py::arg("wire"), py::arg("values"), isa, device, stream, no_gil);
  module.def("decode_sum", &decode_sum, py::arg("wires"), py::arg("factor"), py::arg("values"), isa, device, stream,
             no_gil);
  module.def("decode_sum_encode", &decode_sum_encode, py::arg("wires"), py::arg("num_elements"), py::arg("format"),
             py::arg("wire"), isa, device, stream, seed, first_element, no_gil);
  module.def("cpu_isas", &cpu_isas);
  module.def("set_num_threads", &set_num_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
}

}  // namespace zcomm
