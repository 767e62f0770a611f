#include "zcomm/topology.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "zcomm/error.hpp"

namespace zcomm {

TEST_CASE("topology numbers nodes by their lowest rank and local ranks by rank") {
  const std::vector<int> ids{7, 3, 7, 3, 3};
  const Topology topology(ids);
  CHECK(topology.num_nodes() == 2);
  CHECK(topology.node(0) == 0);
  CHECK(topology.node(4) == 1);
  CHECK(topology.local_rank(2) == 1);
  CHECK(topology.local_rank(4) == 2);
  CHECK(std::vector<int>(topology.ranks(1).begin(), topology.ranks(1).end()) == std::vector<int>{1, 3, 4});
  CHECK(topology.same_node(1, 4));
  CHECK_FALSE(topology.same_node(0, 1));
  CHECK_FALSE(topology.is_hierarchical());
  CHECK(topology.to_string() == "2+3");
}

TEST_CASE("only several equal nodes of several ranks are hierarchical") {
  CHECK(Topology(std::vector<int>{0, 0, 1, 1}).is_hierarchical());
  CHECK(Topology(std::vector<int>{0, 1, 0, 1}).is_hierarchical());
  CHECK_FALSE(Topology(std::vector<int>{0, 0, 0, 0}).is_hierarchical());
  CHECK_FALSE(Topology(std::vector<int>{0, 1, 2, 3}).is_hierarchical());
  CHECK_FALSE(Topology(std::vector<int>{0, 0, 0, 1}).is_hierarchical());
  CHECK(Topology(std::vector<int>{0, 0, 1, 1, 2, 2}).to_string() == "3x2");
  CHECK_THROWS_AS(Topology(std::vector<int>{}), ArgumentError);
}

}  // namespace zcomm
