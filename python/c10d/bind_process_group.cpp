#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bind.hpp"
#include "bind_stats.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {

void bind_process_group(py::module_& module) {
  py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>, ::c10d::Backend>(module, "ProcessGroup")
      .def(py::init([](BackendPtr exact_cpu, StorePtr store, c10::intrusive_ptr<ZcommOptions> options,
                       std::function<std::vector<int>()> agree, std::function<BackendPtr()> make_exact_cuda,
                       std::function<BackendPtr()> make_transport_group, std::function<std::string()> meet_for_nccl,
                       decltype(PythonHooks::split) split, std::function<void()> at_shutdown) {
             return c10::make_intrusive<ProcessGroup>(
                 std::move(exact_cpu), std::move(store), std::move(options),
                 PythonHooks{std::move(agree), std::move(make_exact_cuda), std::move(make_transport_group),
                             std::move(meet_for_nccl), std::move(split), std::move(at_shutdown)});
           }),
           py::arg("exact_cpu"), py::arg("store"), py::arg("options"), py::arg("agree"), py::arg("make_exact_cuda"),
           py::arg("make_transport_group"), py::arg("meet_for_nccl"), py::arg("split"), py::arg("at_shutdown"))
      .def_property_readonly("options", &ProcessGroup::options)
      .def("split", &ProcessGroup::split, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroup::shutdown, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_aborted", &ProcessGroup::is_aborted)
      .def_property_readonly("is_strict", &ProcessGroup::is_strict)
      // torch calls it on ranks that are not in a new group; children have connections of their own, so there is
      // nothing that these ranks take part in.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object&) {})
      .def("gather_format", &ProcessGroup::gather_format, py::arg("output"), py::arg("input"), py::arg("format") = "",
           py::call_guard<py::gil_scoped_release>())
      .def("reduce_format", &ProcessGroup::reduce_format, py::arg("output"), py::arg("input"), py::arg("op"),
           py::arg("formats") = "", py::call_guard<py::gil_scoped_release>())
      .def("all_gather_segments", &ProcessGroup::all_gather_segments, py::arg("output"), py::arg("input"),
           py::arg("segments"), py::arg("secondary"), py::arg("reference"), py::arg("site"), py::arg("async_op"),
           py::call_guard<py::gil_scoped_release>())
      .def("reduce_scatter_segments", &ProcessGroup::reduce_scatter_segments, py::arg("output"), py::arg("input"),
           py::arg("op"), py::arg("segments"), py::arg("feedback"), py::arg("site"), py::arg("async_op"),
           py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_feedback", &ProcessGroup::all_reduce_feedback, py::arg("tensor"), py::arg("op"),
           py::arg("formats"), py::arg("feedback"), py::arg("async_op"), py::call_guard<py::gil_scoped_release>())
      .def("feedback_bytes", &ProcessGroup::feedback_bytes, py::arg("input"), py::arg("segments"), py::arg("format"),
           py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_feedback_bytes", &ProcessGroup::all_reduce_feedback_bytes, py::arg("tensor"), py::arg("formats"),
           py::arg("format"), py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_format", &ProcessGroup::all_reduce_format, py::arg("tensor"), py::arg("op"), py::arg("formats"),
           py::call_guard<py::gil_scoped_release>())
      .def("secondary_bytes", &ProcessGroup::secondary_bytes, py::arg("output"), py::arg("segments"),
           py::call_guard<py::gil_scoped_release>())
      .def("gather_secondary", &ProcessGroup::gather_secondary, py::arg("output"), py::arg("secondary"),
           py::arg("segments"), py::arg("site"), py::arg("async_op"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_step", [](ProcessGroup& group, std::uint64_t step) { group.compressed().set_step(step); },
          py::arg("step"))
      .def("stats", [](ProcessGroup& group) { return stats_of(group.compressed().stats()); })
      .def("losses", [](ProcessGroup& group) { return losses_of(group.compressed().telemetry()); });
}

}  // namespace zcomm::c10d_binding
