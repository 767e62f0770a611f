// Python bindings of topologies and their hops.
#include <pybind11/stl.h>

#include "bind.hpp"
#include "zcomm/topology.hpp"

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

}  // namespace

void bind_topology(py::module_& module) {
  py::class_<Topology>(module, "Topology", "Which ranks share a node, and who sends what to whom. See topology.hpp.")
      .def(py::init([](const std::vector<int>& node_ids) { return Topology(node_ids); }), py::arg("node_ids"))
      .def_property_readonly("size", &Topology::size)
      .def_property_readonly("num_nodes", &Topology::num_nodes)
      .def_property_readonly("is_hierarchical", &Topology::is_hierarchical)
      .def("__str__", &Topology::to_string)
      .def("same_node", &Topology::same_node, py::arg("a"), py::arg("b"))
      .def("holder", &Topology::holder, py::arg("node"), py::arg("slot"))
      .def(
          "reduce_hops",
          [](const Topology& self, int rank) {
            const auto hops = self.reduce_hops(rank);
            return std::pair(named(hops[0]), named(hops[1]));
          },
          py::arg("rank"));
}

}  // namespace zcomm
