// The host codec, in Python. Memory comes as addresses: zcomm/codec.py has looked at the arrays.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "zcomm/codec.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using ValuesTuple = std::tuple<std::uintptr_t, std::int64_t, std::string>;  // address, num_elements, dtype
using WireTuple = std::tuple<std::uintptr_t, std::string, std::string>;     // address, format, dtype

TensorView values_of(const ValuesTuple& values) {
  const auto& [address, num_elements, dtype] = values;
  return {reinterpret_cast<std::byte*>(address), num_elements, parse_dtype(dtype)};
}

Wire wire_of(const WireTuple& wire) {
  const auto& [address, format, dtype] = wire;
  return {reinterpret_cast<const std::byte*>(address), BlockFormat::parse(format), parse_dtype(dtype)};
}

std::vector<Wire> wires_of(const std::vector<WireTuple>& tuples) {
  std::vector<Wire> wires;
  for (const WireTuple& wire : tuples) wires.push_back(wire_of(wire));
  return wires;
}

void encode(const ValuesTuple& values, const std::string& format, std::uintptr_t wire, const std::string& isa) {
  const Encode job{values_of(values), BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire)};
  make_cpu_codec(isa)->encode({&job, 1}, {});
}

void decode(const WireTuple& wire, const ValuesTuple& values, const std::string& isa) {
  const Decode job{wire_of(wire), values_of(values)};
  make_cpu_codec(isa)->decode({&job, 1}, {});
}

void decode_sum(const std::vector<WireTuple>& wires, float factor, const ValuesTuple& values, const std::string& isa) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSum job{sources, factor, values_of(values)};
  make_cpu_codec(isa)->decode_sum({&job, 1}, {});
}

void decode_sum_encode(const std::vector<WireTuple>& wires, std::int64_t num_elements, const std::string& format,
                       std::uintptr_t wire, const std::string& isa) {
  const std::vector<Wire> sources = wires_of(wires);
  const DecodeSumEncode job{sources, num_elements, BlockFormat::parse(format), reinterpret_cast<std::byte*>(wire)};
  make_cpu_codec(isa)->decode_sum_encode({&job, 1}, {});
}

}  // namespace

void bind_codec(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("encode", &encode, py::arg("values"), py::arg("format"), py::arg("wire"), py::arg("isa") = "", no_gil);
  module.def("decode", &decode, py::arg("wire"), py::arg("values"), py::arg("isa") = "", no_gil);
  module.def("decode_sum", &decode_sum, py::arg("wires"), py::arg("factor"), py::arg("values"), py::arg("isa") = "",
             no_gil);
  module.def("decode_sum_encode", &decode_sum_encode, py::arg("wires"), py::arg("num_elements"), py::arg("format"),
             py::arg("wire"), py::arg("isa") = "", no_gil);
  module.def("cpu_isas", &cpu_isas);
  module.def("set_num_threads", &set_num_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
}

}  // namespace zcomm
