#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "bind_stats.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

using GroupClass = py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>, ::c10d::Backend>;

void bind_plans(GroupClass& group_class) {
  group_class
      .def(
          "plan_gather",
          [](ProcessGroup& group, const at::Tensor& output, const at::Tensor& input, const PolicyOverride* formats,
             const Parts& parts, bool again, const std::shared_ptr<PlannedGather>& kept) {
            return group.planned().plan_gather(output, input, formats, parts, again, kept);
          },
          py::arg("output"), py::arg("input"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("parts") = Parts{}, py::arg("again") = false, py::arg("kept") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "plan_differences",
          [](ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
             const std::shared_ptr<PlannedDifferences>& kept) {
            return group.planned().plan_differences(output, input, kept);
          },
          py::arg("output"), py::arg("input"), py::kw_only(), py::arg("kept") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare_differences",
          [](ProcessGroup& group,
             const std::vector<std::tuple<std::shared_ptr<PlannedDifferences>, at::Tensor, HeldShardsPtr, SitePtr>>&
                 gathers,
             bool async) {
            std::vector<PlannedCalls::ToPrepare> all;
            for (const auto& [planned, input, held, site] : gathers) all.push_back({planned, input, held, site});
            return group.planned().prepare_differences(all, async);
          },
          py::arg("gathers"), py::kw_only(), py::arg("async_op") = false, py::call_guard<py::gil_scoped_release>())
      .def(
          "plan_reduce",
          [](ProcessGroup& group, const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op,
             const PolicyOverride* formats, const Parts& parts, const std::optional<BlockFormat>& feedback,
             const std::shared_ptr<PlannedReduce>& kept) {
            return group.planned().plan_reduce(output, input, op, formats, parts, feedback, kept);
          },
          py::arg("output"), py::arg("input"), py::arg("op"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("parts") = Parts{}, py::arg("feedback") = py::none(), py::arg("kept") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "plan_all_reduce",
          [](ProcessGroup& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op, const PolicyOverride* formats,
             const std::optional<BlockFormat>& feedback, const std::shared_ptr<PlannedAllReduce>& kept) {
            return group.planned().plan_all_reduce(tensor, op, formats, feedback, kept);
          },
          py::arg("tensor"), py::arg("op"), py::kw_only(), py::arg("formats") = py::none(),
          py::arg("feedback") = py::none(), py::arg("kept") = py::none(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_process_group(py::module_& module) {
  GroupClass group_class(module, "ProcessGroup");
  bind_plans(group_class);
  group_class
      .def(py::init([](BackendPtr exact_cpu, StorePtr store, c10::intrusive_ptr<ZcommOptions> options,
                       std::function<std::vector<int>()> agree, std::function<BackendPtr()> make_exact_cuda,
                       decltype(PythonHooks::make_transport_group) make_transport_group,
                       std::function<std::string()> meet_for_nccl, decltype(PythonHooks::split) split,
                       decltype(PythonHooks::predict) predict, std::function<void()> at_shutdown) {
             return c10::make_intrusive<ProcessGroup>(
                 std::move(exact_cpu), std::move(store), std::move(options),
                 PythonHooks{std::move(agree), std::move(make_exact_cuda), std::move(make_transport_group),
                             std::move(meet_for_nccl), std::move(split), std::move(predict), std::move(at_shutdown)});
           }),
           py::arg("exact_cpu"), py::arg("store"), py::arg("options"), py::arg("agree"), py::arg("make_exact_cuda"),
           py::arg("make_transport_group"), py::arg("meet_for_nccl"), py::arg("split"), py::arg("predict"),
           py::arg("at_shutdown"))
      .def_property_readonly("options", &ProcessGroup::options)
      .def("split", &ProcessGroup::split, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroup::shutdown, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_aborted", &ProcessGroup::is_aborted)
      .def_property_readonly("is_strict", &ProcessGroup::is_strict)
      // torch calls it on ranks that are not in a new group; children have connections of their own, so there is
      // nothing that these ranks take part in.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object&) {})
      // Plans of compressed calls that were made; a call that its caller has planned before makes none.
      .def_property_readonly("plans_made", [](ProcessGroup& group) { return group.compressed().stats().plans.load(); })
      .def(
          "set_step", [](ProcessGroup& group, std::uint64_t step) { group.compressed().set_step(step); },
          py::arg("step"))
      .def("stats", [](ProcessGroup& group) { return stats_of(group.compressed().stats()); })
      // Of policy="auto", in the order in which they were made.
      .def("decisions", [](ProcessGroup& group) { return decisions_of(group.compressed().auto_policy()); })
      .def("losses", [](ProcessGroup& group) { return losses_of(group.compressed().telemetry()); });
}

}  // namespace zcomm::c10d_binding
