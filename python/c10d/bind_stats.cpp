// Python bindings of a group's counters and measurements.
#include <pybind11/stl.h>

#include <chrono>

#include "bind.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

double seconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) * 1e-9; }
double seconds(std::int64_t nanoseconds) { return seconds(std::chrono::nanoseconds(nanoseconds)); }

// Lists hops up to the last one that has sent anything.
py::list hops_of(const CallStats& cost) {
  std::size_t count = kMaxHops;
  const auto is_idle = [](const HopStats& hop) { return hop.intra_node_bytes + hop.inter_node_bytes == 0; };
  while (count > 0 && is_idle(cost.hops[count - 1])) --count;
  py::list all;
  for (std::size_t i = 0; i < count; ++i) {
    const HopStats& hop = cost.hops[i];
    all.append(py::dict(py::arg("intra_node_bytes") = hop.intra_node_bytes,
                        py::arg("inter_node_bytes") = hop.inter_node_bytes,
                        py::arg("wait_seconds") = seconds(hop.wait_time)));
  }
  return all;
}

py::dict sent_of(const std::map<int, SendRecv::Sent>& sent) {
  py::dict by_peer;
  for (const auto& [peer, counts] : sent) {
    by_peer[py::int_(peer)] = py::dict(py::arg("calls") = counts.calls, py::arg("bytes") = counts.bytes,
                                       py::arg("wire_bytes") = counts.wire_bytes);
  }
  return by_peer;
}

}  // namespace

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
  all["node_memory"] = stats.node_memory;
  all["send_recv"] = sent_of(group.messages().sent());
  return all;
}

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

py::list losses_of(ProcessGroup& group) {
  std::map<LossKey, Loss> losses;
  {
    const py::gil_scoped_release no_gil;
    losses = group.compressed().telemetry().read();
  }
  py::list all;
  constexpr std::array measures{"finite_blocks",      "nonzero", "zeroed", "signal", "noise", "block_errors",
                                "largest_block_error"};
  for (const auto& [key, loss] : losses) {
    const auto& [collective, site, hop, format] = key;
    py::dict row(py::arg("collective") = std::string(to_string(collective)), py::arg("site") = site,
                 py::arg("hop") = hop, py::arg("format") = format, py::arg("calls") = loss.calls,
                 py::arg("samples") = loss.samples, py::arg("elements") = loss.elements,
                 py::arg("blocks") = loss.blocks);
    for (std::size_t i = 0; i < measures.size(); ++i) row[measures[i]] = loss.measures[i];
    all.append(row);
  }
  return all;
}

void bind_stats(py::module_& module) {
  py::class_<Site, SitePtr>(module, "Site")
      .def(py::init<std::string, std::vector<std::string>>(), py::arg("name"), py::arg("parts"))
      .def_readonly("name", &Site::name)
      .def_property_readonly("calls", [](const Site& site) { return site.calls.load(); })
      .def_property_readonly("intra_node_bytes", [](const Site& site) { return site.intra_node_bytes.load(); })
      .def_property_readonly("inter_node_bytes", [](const Site& site) { return site.inter_node_bytes.load(); });

  py::list names;
  for (const Collective collective : kCollectives) names.append(std::string(to_string(collective)));
  module.attr("COLLECTIVES") = py::tuple(names);
  module.def("start_flight_recorder", [] { FlightRecorder::of_process(); });
  module.def("flight_recorder_dump", [] { return py::bytes(FlightRecorder::of_process().dump()); });

  // Exposes the GPU path of samples to tests, which run it on CPU tensors.
  module.def_submodule("_testing").def("measure_on_device", &measure_on_device);
}

}  // namespace zcomm::c10d_binding
