#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

using GroupClass = py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>, ::c10d::Backend>;

void bind_plans(GroupClass& group_class) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  group_class
      .def(
          "plan_gather",
          [](ProcessGroup& group, TensorOrParts output, TensorOrParts input, const PolicyOverride* formats,
             const Parts& parts, bool again, const PlannedPtr& like) {
            return group.operations().plan_gather(whole_of(std::move(output)), whole_of(std::move(input)), formats,
                                                  parts, again, like);
          },
          py::arg("output"), py::arg("input"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("parts") = Parts{}, py::arg("again") = false, py::arg("like") = py::none(), NoGil())
      .def(
          "plan_lossless",
          [](ProcessGroup& group, TensorOrParts output, TensorOrParts input, const Parts& parts,
             const PlannedPtr& like) {
            return group.operations().plan_lossless(whole_of(std::move(output)), whole_of(std::move(input)), parts,
                                                    like);
          },
          py::arg("output"), py::arg("input"), py::kw_only(), py::arg("parts") = Parts{}, py::arg("like") = py::none(),
          NoGil())
      .def(
          "plan_reduce",
          [](ProcessGroup& group, const at::Tensor& output, TensorOrParts input, const ::c10d::ReduceOp& op,
             const PolicyOverride* formats, const Parts& parts, const std::optional<BlockFormat>& feedback,
             const PlannedPtr& like) {
            return group.operations().plan_reduce(output, whole_of(std::move(input)), op, formats, parts, feedback,
                                                  like);
          },
          py::arg("output"), py::arg("input"), py::arg("op"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("parts") = Parts{}, py::arg("feedback") = py::none(), py::arg("like") = py::none(), NoGil())
      .def(
          "plan_all_reduce",
          [](ProcessGroup& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op, const PolicyOverride* formats,
             const std::optional<BlockFormat>& feedback, const PlannedPtr& like) {
            return group.operations().plan_all_reduce(tensor, op, formats, feedback, like);
          },
          py::arg("tensor"), py::arg("op"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("feedback") = py::none(), py::arg("like") = py::none(), NoGil())
      .def(
          "prepare",
          [](ProcessGroup& group, const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers, bool async) {
            return group.operations().prepare(gathers, async);
          },
          py::arg("gathers"), py::kw_only(), py::arg("async_op") = false, NoGil());
}

}  // namespace

void bind_process_group(py::module_& module) {
  GroupClass group_class(module, "ProcessGroup");
  bind_plans(group_class);
  group_class
      .def(py::init([](BackendPtr exact_cpu, c10::intrusive_ptr<ZcommOptions> options,
                       std::function<std::vector<int>()> agree, std::function<BackendPtr()> make_exact_cuda,
                       decltype(PythonHooks::make_transport_group) make_transport_group,
                       decltype(PythonHooks::meet_for_nccl) meet_for_nccl, StorePtr message_store,
                       decltype(PythonHooks::split) split, decltype(PythonHooks::look_up) look_up,
                       std::function<std::int64_t()> now, std::function<void()> decided,
                       std::function<void(const std::string&)> no_node_memory, std::function<void()> at_shutdown) {
             return c10::make_intrusive<ProcessGroup>(
                 std::move(exact_cpu), std::move(options),
                 PythonHooks{std::move(agree), std::move(make_exact_cuda), std::move(make_transport_group),
                             std::move(meet_for_nccl), std::move(message_store), std::move(split), std::move(look_up),
                             std::move(now), std::move(decided), std::move(no_node_memory), std::move(at_shutdown)});
           }),
           py::arg("exact_cpu"), py::arg("options"), py::arg("agree"), py::arg("make_exact_cuda"),
           py::arg("make_transport_group"), py::arg("meet_for_nccl"), py::arg("message_store"), py::arg("split"),
           py::arg("look_up"), py::arg("now"), py::arg("decided"), py::arg("no_node_memory"), py::arg("at_shutdown"))
      .def_property_readonly("options", &ProcessGroup::options)
      .def("split", &ProcessGroup::split, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroup::shutdown, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_aborted", &ProcessGroup::is_aborted)
      .def("set_connections", &ProcessGroup::set_connections, py::arg("each_way"),
           py::call_guard<py::gil_scoped_release>())
      .def("drain_host", [](ProcessGroup& group) { group.compressed().drain_host(); })
      .def_property_readonly("connections", &ProcessGroup::connections)
      .def_property_readonly("is_strict", &ProcessGroup::is_strict)
      // torch calls this on ranks outside of a new group. They have nothing to do, because children connect by
      // themselves.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object&) {})
      // Number of plans made for compressed calls; a call with a plan of its caller makes none.
      .def_property_readonly(
          "plans_made",
          [](ProcessGroup& group) { return group.compressed().stats().withLock([](Stats& s) { return s.plans; }); })
      .def(
          "set_step", [](ProcessGroup& group, std::uint64_t step) { group.compressed().set_step(step); },
          py::arg("step"))
      .def("stats", &stats_of)
      .def("decisions", &decisions_of)
      .def("end_step", [](ProcessGroup& group) { group.compressed().auto_policy().steps().end_step(); })
      .def("step_decision", &step_decision_of)
      .def("losses", &losses_of);
}

}  // namespace zcomm::c10d_binding
