// Python bindings of topologies, and of the plans of collectives.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/plan.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/trace.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using Pairs = std::vector<std::pair<int, int>>;

Pairs pairs_of(const std::vector<Move>& moves) {
  Pairs pairs;
  for (const Move& move : moves) pairs.emplace_back(move.peer, move.slot);
  return pairs;
}

// Returns the sends and the receives.
std::pair<Pairs, Pairs> named(const Hop& hop) { return {pairs_of(hop.sends), pairs_of(hop.recvs)}; }

void bind_topology(py::module_& module) {
  py::class_<Topology>(module, "Topology", "Which ranks share a node, and who sends what to whom. See topology.hpp.")
      .def(py::init([](const std::vector<int>& node_ids) { return Topology(node_ids); }), py::arg("node_ids"))
      .def("__str__", &Topology::to_string)
      .def("same_node", &Topology::same_node, py::arg("a"), py::arg("b"))
      .def(
          "reduce_hops",
          [](const Topology& self, int rank) {
            const auto hops = self.reduce_hops(rank);
            return std::pair(named(hops[0]), named(hops[1]));
          },
          py::arg("rank"));
}

void bind_costs(py::module_& module) {
  py::class_<LinkBytes>(module, "LinkBytes", "Bytes that one rank sends.")
      .def_readonly("intra_node", &LinkBytes::intra_node, "To ranks of the same node.")
      .def_readonly("inter_node", &LinkBytes::inter_node, "To other nodes.");
  py::class_<TraceStep> step(module, "TraceStep", "A call of a rank's codec or transport. See trace.hpp.");
  py::enum_<TraceStep::Kind>(step, "Kind")
      .value("CODEC", TraceStep::Kind::codec)
      .value("TRANSFER", TraceStep::Kind::transfer)
      .value("WAIT", TraceStep::Kind::wait);
  step.def_readonly("kind", &TraceStep::kind)
      .def_readonly("number", &TraceStep::number)
      .def_readonly("num_bytes", &TraceStep::num_bytes)
      .def_readonly("sent", &TraceStep::sent)
      .def_readonly("num_ring_steps", &TraceStep::num_ring_steps)
      .def_readonly("is_beside", &TraceStep::is_beside);
}

template <class Plan>
Trace trace(const Plan& self, bool grouped) {
  return trace_of(self, grouped);
}

// Binds a plan of slots; `lengths` are the elements of each rank's.
template <class Plan, class Format>
py::class_<Plan> bind_slots(py::module_& module, const char* name, const char* doc) {
  return py::class_<Plan>(module, name, doc)
      .def(py::init([](const Topology& topology, int rank, std::vector<std::int64_t> lengths, const std::string& dtype,
                       const NamedSegments& segments, std::size_t chunk_bytes) {
             return Plan({topology, rank, chunk_bytes}, {std::move(lengths), parse_dtype(dtype)},
                         parse_segments<Format>(segments));
           }),
           py::arg("topology"), py::arg("rank"), py::arg("lengths"), py::arg("dtype"), py::arg("segments"),
           py::arg("chunk_bytes") = kDefaultChunkBytes)
      .def_property_readonly("bytes_by_hop", &Plan::bytes_by_hop)
      .def_property_readonly("bytes", &Plan::bytes);
}

void bind_lossless_gather(py::module_& module) {
  py::class_<LosslessPlan>(module, "LosslessPlan",
                           "What one rank does in an all_gather by lossless differences. See plan.hpp.")
      .def(py::init([](const Topology& topology, int rank, std::vector<std::int64_t> lengths, const std::string& dtype,
                       std::size_t chunk_bytes) {
             return LosslessPlan({topology, rank, chunk_bytes}, {std::move(lengths), parse_dtype(dtype)});
           }),
           py::arg("topology"), py::arg("rank"), py::arg("lengths"), py::arg("dtype"),
           py::arg("chunk_bytes") = kDefaultChunkBytes)
      .def_property_readonly("num_chunks", &LosslessPlan::num_chunks)
      .def("bytes", &LosslessPlan::bytes, py::arg("body_bytes"))
      .def_property_readonly("bytes_from_secondary", &LosslessPlan::bytes_from_secondary)
      .def_property_readonly("secondary_bytes", &LosslessPlan::secondary_bytes)
      .def_property_readonly("largest_secondary_bytes", &LosslessPlan::largest_secondary_bytes);
}

void bind_all_reduce(py::module_& module) {
  py::class_<AllReducePlan>(module, "AllReducePlan", "What one rank does in an all_reduce. See plan.hpp.")
      .def(py::init([](const Topology& topology, int rank, std::int64_t num_elements, const std::string& dtype,
                       const std::string& formats, std::size_t chunk_bytes) {
             return AllReducePlan({topology, rank, chunk_bytes}, num_elements, parse_dtype(dtype),
                                  HopFormats::parse(formats));
           }),
           py::arg("topology"), py::arg("rank"), py::arg("num_elements"), py::arg("dtype"), py::arg("formats"),
           py::arg("chunk_bytes") = kDefaultChunkBytes)
      .def_property_readonly("bytes_by_hop", &AllReducePlan::bytes_by_hop)
      .def("trace", &trace<AllReducePlan>, py::arg("grouped"));
}

// Binds the plan of an all-to-all; `sent` and `received` are the elements for and from each rank.
void bind_exchange(py::module_& module) {
  py::class_<ExchangePlan>(module, "ExchangePlan", "What one rank does in an all_to_all. See exchange.hpp.")
      .def(py::init([](const Topology& topology, int rank, std::vector<std::int64_t> sent,
                       std::vector<std::int64_t> received, const std::string& dtype, const std::string& formats,
                       std::size_t chunk_bytes) {
             return ExchangePlan::all_to_all({topology, rank, chunk_bytes}, std::move(sent), std::move(received),
                                             parse_dtype(dtype), HopFormats::parse(formats));
           }),
           py::arg("topology"), py::arg("rank"), py::arg("sent"), py::arg("received"), py::arg("dtype"),
           py::arg("formats"), py::arg("chunk_bytes") = kDefaultChunkBytes)
      .def("trace", &trace<ExchangePlan>, py::arg("grouped"));
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_topology(module);
  bind_costs(module);
  bind_slots<GatherPlan, BlockFormat>(module, "GatherPlan", "What one rank does in an all_gather. See plan.hpp.")
      .def_static(
          "in_one_chunk",
          [](const Topology& topology, std::vector<std::int64_t> lengths, const std::string& dtype,
             const std::string& format) {
            const Segment<BlockFormat> segment{lengths.at(0), BlockFormat::parse(format)};
            return GatherPlan({topology, 0, kDefaultGpuChunkBytes}, {std::move(lengths), parse_dtype(dtype)},
                              {&segment, 1}, false, 1, true);
          },
          py::arg("topology"), py::arg("lengths"), py::arg("dtype"), py::arg("format"))
      .def(
          "trace", [](const GatherPlan& self, bool grouped, bool again) { return trace_of(self, grouped, again); },
          py::arg("grouped"), py::arg("again") = false);
  bind_lossless_gather(module);
  bind_slots<ReducePlan, HopFormats>(module, "ReducePlan", "What one rank does in a reduce_scatter. See plan.hpp.")
      .def("trace", &trace<ReducePlan>, py::arg("grouped"));
  bind_all_reduce(module);
  bind_exchange(module);
}

}  // namespace zcomm
