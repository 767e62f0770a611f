// Python bindings of a process group: its plans, and what it has counted and decided so far.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>

#include "bind.hpp"
#include "c10d/calls/nccl_rendezvous.hpp"
#include "c10d/calls/operations.hpp"
#include "c10d/group/elastic_group.hpp"

namespace zcomm::c10d_binding {
namespace {

using GroupClass = py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>, ::c10d::Backend>;

double seconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) * 1e-9; }
double seconds(std::int64_t nanoseconds) { return seconds(std::chrono::nanoseconds(nanoseconds)); }

// Lists hops up to the last one that has sent anything.
py::list hops_of(const CallStats& cost) {
  std::size_t count = kMaxHops;
  while (count > 0 && cost.bytes_by_hop[count - 1] == LinkBytes{}) --count;
  py::list all;
  for (std::size_t i = 0; i < count; ++i) {
    const auto [intra_node, inter_node] = cost.bytes_by_hop[i];
    all.append(py::dict(py::arg("intra_node_bytes") = intra_node, py::arg("inter_node_bytes") = inter_node,
                        py::arg("wait_seconds") = seconds(cost.wait_time[i])));
  }
  return all;
}

py::dict sent_of(const std::map<int, SendRecv::Sent>& sent) {
  py::dict by_peer;
  for (const auto& [peer, counts] : sent) {
    const auto [calls, bytes, wire_bytes] = counts;
    by_peer[py::int_(peer)] =
        py::dict(py::arg("calls") = calls, py::arg("bytes") = bytes, py::arg("wire_bytes") = wire_bytes);
  }
  return by_peer;
}

py::dict stats_of(ProcessGroup& group) {
  Stats stats = group.compressed().stats().withLock([](const Stats& now) { return now; });
  const auto calls_dict = [](const Stats::Calls& calls) {
    return py::dict(py::arg("calls") = calls.calls, py::arg("bytes") = calls.bytes);
  };
  py::dict all;
  for (const Collective collective : kCollectives) {
    const CallStats& cost = stats.cost(collective);
    py::dict exact;
    for (int i = 1; i < kNumVerdicts; ++i) {
      const auto verdict = static_cast<Verdict>(i);
      const Stats::Calls& calls = stats.calls(collective, verdict);
      if (calls.calls > 0) exact[py::str(std::string(to_string(verdict)))] = calls_dict(calls);
    }
    const Stats::Calls& compressed = stats.calls(collective, Verdict::compressed);
    all[py::str(std::string(to_string(collective)))] = py::dict(
        py::arg("calls") = compressed.calls, py::arg("bytes") = compressed.bytes,
        py::arg("intra_node_bytes") = cost.intra_node_bytes, py::arg("inter_node_bytes") = cost.inter_node_bytes,
        py::arg("codec_seconds") = seconds(cost.codec_time), py::arg("transfer_seconds") = seconds(cost.transfer_time),
        py::arg("host_waits") = cost.host_waits, py::arg("hops") = hops_of(cost), py::arg("exact") = exact);
  }
  all["rehearsals"] = py::dict(py::arg("calls") = stats.rehearsals.calls, py::arg("bytes") = stats.rehearsals.bytes,
                               py::arg("intra_node_bytes") = stats.rehearsals_cost.intra_node_bytes,
                               py::arg("inter_node_bytes") = stats.rehearsals_cost.inter_node_bytes);
  all["others"] = calls_dict(stats.others);
  all["corrupted_messages"] = group.errors().num_corrupted();
  all["node_memory"] = stats.node_memory;
  all["send_recv"] = sent_of(group.messages().sent());
  return all;
}

// Of compress="auto", in order.
py::list decisions_of(ProcessGroup& group) {
  py::list all;
  for (const AutoPolicy::Decision& decision : group.compressed().auto_policy().decisions()) {
    all.append(py::dict(py::arg("collective") = std::string(to_string(decision.collective)),
                        py::arg("dtype") = std::string(to_string(decision.dtype)),
                        py::arg("least_bytes") = std::int64_t{1} << decision.log2_bytes,
                        py::arg("format") = decision.formats.to_string(), py::arg("by") = std::string(decision.by),
                        py::arg("compressed") = decision.compressed, py::arg("one_hop") = decision.times.is_one_hop(),
                        py::arg("exact_seconds") = seconds(decision.times.exact),
                        py::arg("compressed_seconds") = seconds(decision.times.compressed),
                        py::arg("one_hop_seconds") = seconds(decision.times.one_hop),
                        py::arg("rounds") = decision.rounds, py::arg("again") = decision.again));
  }
  return all;
}

// None without a decision by steps.
py::object step_decision_of(ProcessGroup& group) {
  const std::vector<Round> rounds = group.compressed().auto_policy().steps().decided_rounds();
  if (rounds.empty()) return py::none();
  const Round medians = medians_of(rounds);
  const Round spreads = spreads_of(rounds);
  return py::dict(py::arg("compressed") = StepChoice::gains(rounds),
                  py::arg("steps") = 2 * (StepChoice::kBlockSteps - 1) * std::ssize(rounds),
                  py::arg("exact_seconds") = seconds(medians.exact), py::arg("exact_spread") = seconds(spreads.exact),
                  py::arg("compressed_seconds") = seconds(medians.compressed),
                  py::arg("compressed_spread") = seconds(spreads.compressed));
}

py::list quantization_errors_of(ProcessGroup& group) {
  std::map<ErrorKey, QuantizationError> errors;
  {
    const py::gil_scoped_release no_gil;
    errors = group.compressed().telemetry().read();
  }
  py::list all;
  constexpr std::array measures{"finite_blocks",      "nonzero", "zeroed", "signal", "noise", "block_errors",
                                "largest_block_error"};
  for (const auto& [key, error] : errors) {
    const auto& [collective, site, hop, format] = key;
    py::dict row(py::arg("collective") = std::string(to_string(collective)), py::arg("site") = site,
                 py::arg("hop") = hop, py::arg("format") = format, py::arg("calls") = error.calls,
                 py::arg("samples") = error.samples, py::arg("elements") = error.elements,
                 py::arg("blocks") = error.blocks);
    for (std::size_t i = 0; i < measures.size(); ++i) row[measures[i]] = error.measures[i];
    all.append(row);
  }
  return all;
}

// Looks up what torch's NCCL group has beyond a Backend. Pools of memory are registered with the exact group.
py::object attribute_of_nccl(ProcessGroup& group, const std::string& name) {
  if (name != "register_mem_pool" && name != "deregister_mem_pool") {
    throw py::attribute_error(name + ": not supported by the backend 'zcomm'");
  }
  BackendPtr nccl;
  try {
    const py::gil_scoped_release no_gil;
    nccl = BackendPtr::unsafe_reclaim_from_nonowning(&group.of_nccl(name.c_str()));
  } catch (const c10::Error& error) {
    throw py::attribute_error(error.what_without_backtrace());  // so that hasattr() is False
  }
  return py::cast(std::move(nccl)).attr(name.c_str());
}

void bind_counters(py::module_& module) {
  py::class_<Site, SitePtr>(module, "Site")
      .def(py::init<std::string, std::vector<std::string>>(), py::arg("name"), py::arg("parts"))
      .def_property_readonly("calls", [](const Site& site) { return site.calls.load(); })
      .def_property_readonly("intra_node_bytes", [](const Site& site) { return site.intra_node_bytes.load(); })
      .def_property_readonly("inter_node_bytes", [](const Site& site) { return site.inter_node_bytes.load(); });

  py::list names;
  for (const Collective collective : kCollectives) names.append(std::string(to_string(collective)));
  module.attr("COLLECTIVES") = py::tuple(names);
  module.def("start_flight_recorder", [] { FlightRecorder::of_process(); });
  module.def("flight_recorder_dump", [] { return py::bytes(FlightRecorder::of_process().dump()); });
}

// Plans a reduction if there is an `op`, which is an all-reduce without an `input`; else a gather.
PlanOrVerdict plan_of(ProcessGroup& group, TensorOrParts output, std::optional<TensorOrParts> input,
                      const std::optional<::c10d::ReduceOp>& op, const PolicyOverride* formats, Parts parts,
                      const std::optional<BlockFormat>& feedback, bool again, bool leaves_wires, bool compared,
                      const PlannedPtr& like) {
  TORCH_CHECK_VALUE(input || op, "zcomm: input: expected a tensor to gather, got none");
  TORCH_CHECK_VALUE(
      op ? !again && !leaves_wires : !feedback && !compared, "zcomm: op: expected ",
      op ? "none, as again and leaves_wires are for gathers" : "one, as feedback and compared are for reductions");
  Request request;
  if (op) request.call.collective = input ? Collective::reduce_scatter : Collective::all_reduce;
  request.call.again = again;
  request.leaves_wires = leaves_wires;
  request.outputs = whole_of(std::move(output));
  request.inputs = input ? whole_of(std::move(*input)) : request.outputs;
  request.op = op.value_or(::c10d::ReduceOp::SUM);
  request.parts = std::move(parts);
  request.residual_format = feedback;
  request.compared = compared;
  return plan(group.compressed(), std::move(request), formats, like);
}

PlannedPtr plan_lossless(ProcessGroup& group, TensorOrParts output, TensorOrParts input, Parts parts,
                         const PlannedPtr& like) {
  Request request;
  request.outputs = whole_of(std::move(output));
  request.inputs = whole_of(std::move(input));
  request.parts = std::move(parts);
  request.lossless = true;
  return std::get<PlannedPtr>(plan(group.compressed(), std::move(request), nullptr, like));
}

// Returns a function of a group's compressed calls as one of the group.
template <class Result, class... Args>
auto of_group(Result (*function)(CompressedCalls&, Args...)) {
  return [function](ProcessGroup& group, Args... args) {
    return function(group.compressed(), std::forward<Args>(args)...);
  };
}

void bind_plans(GroupClass& group_class) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  group_class
      .def("plan", &plan_of, py::arg("output"), py::arg("input") = py::none(), py::arg("op") = py::none(),
           py::kw_only(), py::arg("formats") = py::none(), py::arg("parts") = Parts{}, py::arg("feedback") = py::none(),
           py::arg("again") = false, py::arg("leaves_wires") = false, py::arg("compared") = false,
           py::arg("like") = py::none(), NoGil())
      .def("plan_lossless", &plan_lossless, py::arg("output"), py::arg("input"), py::kw_only(),
           py::arg("parts") = Parts{}, py::arg("like") = py::none(), NoGil())
      .def("prepare", of_group(prepare), py::arg("gathers"), py::kw_only(), py::arg("async_op") = false, NoGil())
      .def("gather_numbers", of_group(gather_numbers), py::arg("output"), py::arg("input"), py::kw_only(),
           py::arg("site"), NoGil());
}

void bind_elastic_group([[maybe_unused]] py::module_& module) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  py::class_<ElasticGroup, c10::intrusive_ptr<ElasticGroup>, ::c10d::Backend>(module, "ElasticGroup")
      .def(py::init<int, int, c10::intrusive_ptr<ZcommOptions>, std::string, ElasticGroup::Make>(), py::arg("rank"),
           py::arg("size"), py::arg("options"), py::arg("handle"), py::arg("make"))
      .def_property_readonly("members", &ElasticGroup::members)
      .def("shutdown", &ElasticGroup::shutdown, py::call_guard<py::gil_scoped_release>())
      .def("perform_nocolor_split", [](ElasticGroup&, const py::object&) {});
#endif
}

}  // namespace

void bind_process_group(py::module_& module) {
  bind_counters(module);
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
      .def("__getattr__", &attribute_of_nccl)
      .def_property_readonly("is_aborted", &ProcessGroup::is_aborted)
      .def_property("connections", &ProcessGroup::connections,
                    py::cpp_function(&ProcessGroup::set_connections, py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly("is_strict", &ProcessGroup::is_strict)
      .def_property(
          "description", [](const ProcessGroup& group) { return group.getGroupDesc(); },
          [](ProcessGroup& group, const std::string& description) { group.setGroupDesc(description); })
      // torch calls this on ranks outside of a new group. They have nothing to do, because children connect by
      // themselves.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object&) {})
      .def(
          "set_step", [](ProcessGroup& group, std::uint64_t step) { group.compressed().set_step(step); },
          py::arg("step"))
      .def("stats", &stats_of)
      .def("decisions", &decisions_of)
      .def("end_step", [](ProcessGroup& group) { group.compressed().auto_policy().steps().end_step(); })
      .def("step_decision", &step_decision_of)
      .def("quantization_errors", &quantization_errors_of);
  bind_elastic_group(module);
}

// zcomm._c10d: Python bindings of the torch.distributed backend.
PYBIND11_MODULE(_c10d, module) {
  py::module_::import("torch.distributed");
  py::module_::import("zcomm._core");  // registers formats
  bind_options(module);
  bind_call_hooks(module);
  bind_operations(module);
  bind_shard_mark(module);
  bind_process_group(module);
  module.def("has_high_priority", &has_high_priority);
}

}  // namespace zcomm::c10d_binding
