// The codec of differences, in Python, on host memory. Memory comes as addresses.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "views.hpp"
#include "zcomm/difference.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

std::pair<std::size_t, std::uint64_t> encode_difference(const ArrayTuple& values, const ArrayTuple& base,
                                                        std::uintptr_t body, const std::string& isa) {
  const auto encoded = DifferenceCodec(isa).encode(view_of(values), view_of(base), reinterpret_cast<std::byte*>(body));
  return {encoded.num_bytes, encoded.hash};
}

std::uint64_t decode_difference(std::uintptr_t body, std::size_t num_bytes, const ArrayTuple& base,
                                const std::string& isa) {
  return DifferenceCodec(isa).decode({reinterpret_cast<const std::byte*>(body), num_bytes}, view_of(base));
}

std::uint64_t hash_of_values(const ArrayTuple& values, const std::string& isa) {
  return DifferenceCodec(isa).hash(view_of(values));
}

}  // namespace

void bind_difference(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto isa = py::arg("isa") = "";
  module.def("max_difference_bytes", &max_difference_bytes, py::arg("num_elements"));
  module.def("encode_difference", &encode_difference, py::arg("values"), py::arg("base"), py::arg("body"), isa, no_gil);
  module.def("decode_difference", &decode_difference, py::arg("body"), py::arg("num_bytes"), py::arg("base"), isa,
             no_gil);
  module.def("hash_of_values", &hash_of_values, py::arg("values"), isa, no_gil);
}

}  // namespace zcomm
