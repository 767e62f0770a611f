// Plans as their callers in Python hold them.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "planned_calls.hpp"

namespace zcomm::c10d_binding {
namespace {

// Pairs of elements and a format's name.
template <class Segments>
NamedSegments named(const Segments& segments) {
  NamedSegments all;
  for (const auto& segment : segments) all.emplace_back(segment.num_elements, segment.format.to_string());
  return all;
}

// `calls` of a group that is still there.
template <class P>
BackendPtr group_of(const P& planned) {
  BackendPtr group = planned.group.lock();
  TORCH_CHECK(group, "zcomm: the process group of this plan was destroyed");
  return group;
}

// Calls check it.
HeldShardsPtr hold(const PlannedDifferences&, const at::Tensor& data) {
  auto held = std::make_shared<HeldShards>();
  held->data = data;
  held->kept.values = {static_cast<std::byte*>(data.data_ptr()), data.nbytes()};
  return held;
}

void bind_differences(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<HeldShards, HeldShardsPtr>(module, "HeldShards")
      .def_readonly("data", &HeldShards::data)
      .def_property_readonly("generation", [](const HeldShards& held) { return held.kept.generation.load(); })
      .def_property_readonly("sent_bytes", [](const HeldShards& held) { return held.kept.sent_bytes.load(); });
  py::class_<PlannedDifferences, std::shared_ptr<PlannedDifferences>>(module, "PlannedDifferences")
      .def_property_readonly("description", [](const PlannedDifferences& p) { return p.plan->description(); })
      .def_property_readonly("kept_bytes", [](const PlannedDifferences& p) { return p.plan->kept_bytes(); })
      .def_property_readonly("largest_kept_bytes",
                             [](const PlannedDifferences& p) { return p.plan->largest_kept_bytes(); })
      .def("hold", &hold, py::arg("data"))
      .def(
          "run",
          [](const PlannedDifferences& planned, const at::Tensor& output, const at::Tensor& input,
             const HeldShardsPtr& held, const SitePtr& site, bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->gather_differences(planned, output, input, held, site, async);
          },
          py::arg("output"), py::arg("input"), py::arg("held").none(false), py::kw_only(), py::arg("site") = py::none(),
          py::arg("async_op") = false, NoGil())
      .def(
          "run_from_held",
          [](const PlannedDifferences& planned, const at::Tensor& output, const HeldShardsPtr& held,
             const SitePtr& site, bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->gather_held(planned, output, held, site, async);
          },
          py::arg("output"), py::arg("held").none(false), py::kw_only(), py::arg("site") = py::none(),
          py::arg("async_op") = false, NoGil());
}

template <class P>
py::class_<P, std::shared_ptr<P>> bind_plan(py::module_& module, const char* name) {
  return py::class_<P, std::shared_ptr<P>>(module, name)
      .def_property_readonly("description", [](const P& planned) { return planned.plan->description(); })
      .def_property_readonly("format", [](const P& planned) { return planned.format.to_string(); })
      .def_property_readonly("intra_node_bytes", [](const P& planned) { return planned.plan->bytes().intra_node; })
      .def_property_readonly("inter_node_bytes", [](const P& planned) { return planned.plan->bytes().inter_node; });
}

}  // namespace

void bind_planned_calls(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bind_plan<PlannedGather>(module, "PlannedGather")
      .def_property_readonly("segments", [](const PlannedGather& planned) { return named(planned.plan->segments()); })
      .def_property_readonly("secondary_bytes", [](const PlannedGather& p) { return p.plan->secondary_bytes(); })
      .def_property_readonly("largest_secondary_bytes",
                             [](const PlannedGather& p) { return p.plan->largest_secondary_bytes(); })
      .def(
          "run",
          [](const PlannedGather& planned, const at::Tensor& output, const at::Tensor& input,
             const std::optional<at::Tensor>& secondary, const std::optional<at::Tensor>& reference,
             const SitePtr& site, bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->gather(planned, output, input, secondary, reference, site, async);
          },
          py::arg("output"), py::arg("input"), py::kw_only(), py::arg("secondary") = py::none(),
          py::arg("reference") = py::none(), py::arg("site") = py::none(), py::arg("async_op") = false, NoGil())
      .def(
          "run_from_secondary",
          [](const PlannedGather& planned, const at::Tensor& output, const at::Tensor& secondary, const SitePtr& site,
             bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->gather_secondary(planned, output, secondary, site, async);
          },
          py::arg("output"), py::arg("secondary"), py::kw_only(), py::arg("site") = py::none(),
          py::arg("async_op") = false, NoGil());
  bind_differences(module);
  py::class_<HeldResidual>(module, "Residual")
      .def(py::init(
               [](at::Tensor data, float decay, bool empty) { return HeldResidual{std::move(data), decay, empty}; }),
           py::arg("data"), py::kw_only(), py::arg("decay"), py::arg("empty"));
  bind_plan<PlannedReduce>(module, "PlannedReduce")
      .def_property_readonly("segments", [](const PlannedReduce& planned) { return named(planned.plan->segments()); })
      .def_property_readonly("residual_bytes", [](const PlannedReduce& p) { return p.plan->residual_bytes(); })
      .def(
          "run",
          [](const PlannedReduce& planned, const at::Tensor& output, const at::Tensor& input,
             const ::c10d::ReduceOp& op, const std::optional<HeldResidual>& residual, const SitePtr& site, bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->reduce(planned, output, input, op, residual, site, async);
          },
          py::arg("output"), py::arg("input"), py::arg("op"), py::kw_only(), py::arg("residual") = py::none(),
          py::arg("site") = py::none(), py::arg("async_op") = false, NoGil());
  bind_plan<PlannedAllReduce>(module, "PlannedAllReduce")
      .def_property_readonly("residual_bytes", [](const PlannedAllReduce& p) { return p.plan->residual_bytes(); })
      .def(
          "run",
          [](const PlannedAllReduce& planned, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
             const std::optional<HeldResidual>& residual, bool async) {
            const BackendPtr group = group_of(planned);
            return planned.calls->all_reduce(planned, tensor, op, residual, async);
          },
          py::arg("tensor"), py::arg("op"), py::kw_only(), py::arg("residual") = py::none(),
          py::arg("async_op") = false, NoGil());
}

}  // namespace zcomm::c10d_binding
