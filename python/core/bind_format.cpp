// Python bindings of formats and wire layouts.
#include "bind.hpp"
#include "zcomm/block_format.hpp"
#include "zcomm/wire_layout.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

template <class Format>
py::class_<Format> bind_text(py::module_& module, const char* name) {
  return py::class_<Format>(module, name)
      .def(py::init(&Format::parse), py::arg("text"))
      .def("__str__", &Format::to_string)
      .def("__repr__", [name](const Format& self) { return std::string(name) + "('" + self.to_string() + "')"; })
      .def("__hash__", [](const Format& self) { return py::hash(py::str(self.to_string())); })
      .def("__eq__", [](const Format& self, const Format& other) { return self == other; }, py::is_operator());
}

}  // namespace

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

}  // namespace zcomm
