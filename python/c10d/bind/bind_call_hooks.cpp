// Python bindings of call hooks.
#include "bind.hpp"
#include "c10d/job/call_hooks.hpp"

namespace zcomm::c10d_binding {
namespace {

template <std::size_t LinkBytes::* link>
std::optional<std::size_t> sent_on(const HookedCall& call) {
  return call.bytes ? std::optional((*call.bytes).*link) : std::nullopt;
}

}  // namespace

void bind_call_hooks(py::module_& module) {
  py::class_<HookedCall, HookedCallPtr>(module, "HookedCall")
      .def_readonly("group", &HookedCall::group)
      .def_readonly("collective", &HookedCall::collective)
      .def_readonly("verdict", &HookedCall::verdict)
      .def_readonly("inputs", &HookedCall::inputs)
      .def_readonly("outputs", &HookedCall::outputs)
      .def_readonly("description", &HookedCall::description)
      .def_readonly("site", &HookedCall::site)
      .def_property_readonly("intra_node_bytes", &sent_on<&LinkBytes::intra_node>)
      .def_property_readonly("inter_node_bytes", &sent_on<&LinkBytes::inter_node>)
      .def_property_readonly("begun", [](const HookedCall& call) {
        return std::chrono::duration<double>(call.begun.time_since_epoch()).count();
      });
  module.def("set_call_hook", &CallHooks::set, py::arg("function").none(true));
}

}  // namespace zcomm::c10d_binding
