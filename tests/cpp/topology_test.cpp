#include "zcomm/topology.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "zcomm/error.hpp"
#include "zcomm/plan.hpp"

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

TEST_CASE("in one hop all exchange with all, in the same nodes") {
  const Topology topology(std::vector<int>{0, 0, 1, 1});
  const auto [first, second] = topology.gather_hops(1, /*in_one_hop=*/true);
  CHECK(first.sends == std::vector<Move>{{2, 1}, {3, 1}, {0, 1}});
  CHECK(second.sends.empty());
  const SlotShape slots{{8, 8, 8, 8}, DType::float32};
  const Segment<BlockFormat> whole{8, {}};
  const GatherPlan in_one({topology, 1}, slots, {&whole, 1}, /*in_one_hop=*/true);
  CHECK(in_one.is_in_one_hop());
  CHECK(in_one.num_hops() == 1);
  CHECK(in_one.bytes() == LinkBytes{32, 64});
  const GatherPlan in_two({topology, 1}, slots, {&whole, 1});
  CHECK_FALSE(in_two.is_in_one_hop());
  CHECK(in_two.num_hops() == 2);
  CHECK(in_two.description() + " in one hop" == in_one.description());
  const SlotShape three{{8, 8, 8}, DType::float32};
  CHECK_FALSE(GatherPlan({Topology(std::vector<int>{0, 1, 2}), 1}, three, {&whole, 1}, true).is_in_one_hop());
}

namespace {

std::vector<int> slots_of(const std::vector<Move>& moves) {
  std::vector<int> slots;
  for (const Move& move : moves) slots.push_back(move.slot);
  std::sort(slots.begin(), slots.end());
  return slots;
}

// Returns the slots that `from` sends to `to`, or that `to` expects from `from`, in order.
std::vector<int> slots_between(const std::vector<Move>& moves, int peer) {
  std::vector<int> slots;
  for (const Move& move : moves) {
    if (move.peer == peer) slots.push_back(move.slot);
  }
  return slots;
}

const std::vector<std::vector<int>> kNodes{{0},          {0, 0, 0},       {0, 1, 2},          {0, 0, 1, 1},
                                           {0, 0, 0, 1}, {0, 1, 0, 1, 1}, {0, 0, 1, 1, 2, 2}, {0, 1, 2, 0, 1, 2}};

}  // namespace

TEST_CASE("routes: what is sent is what its receiver expects, in the same order, and goes to peers only") {
  for (const std::vector<int>& ids : kNodes) {
    const Topology topology(ids);
    const auto hops = [&](int rank) {
      const auto gather = topology.gather_hops(rank), reduce = topology.reduce_hops(rank);
      return std::vector<Hop>{
          gather[0], gather[1], reduce[0], reduce[1], topology.secondary_hop(rank), topology.holder_hop(rank)};
    };
    for (int rank = 0; rank < topology.size(); ++rank) {
      const std::vector<int> peers = topology.peers(rank);
      for (std::size_t i = 0; i < hops(rank).size(); ++i) {
        for (int peer = 0; peer < topology.size(); ++peer) {
          const std::vector<int> sent = slots_between(hops(rank)[i].sends, peer);
          CHECK(sent == slots_between(hops(peer)[i].recvs, rank));
          CHECK((sent.empty() || std::count(peers.begin(), peers.end(), peer) == 1));
        }
      }
    }
  }
}

TEST_CASE("routes: a gather brings every slot once, over the slow links once for each node") {
  for (const std::vector<int>& ids : kNodes) {
    const Topology topology(ids);
    for (int rank = 0; rank < topology.size(); ++rank) {
      std::vector<int> slots{rank};
      std::vector<int> from_shards;
      for (const Hop& hop : topology.gather_hops(rank)) {
        for (const Move& move : hop.recvs) slots.push_back(move.slot);
      }
      for (const Move& move : topology.secondary_hop(rank).recvs) {
        CHECK(topology.link(rank, move.peer) == Link::intra_node);
        from_shards.push_back(move.slot);
      }
      std::vector<int> held;
      for (int slot = 0; slot < topology.size(); ++slot) {
        if (topology.holder(topology.node(rank), slot) == rank) held.push_back(slot);
      }
      from_shards.insert(from_shards.end(), held.begin(), held.end());
      // Holders have what comes from owners in other nodes, and what they own or a rank of their node does.
      for (const Move& move : topology.holder_hop(rank).recvs) {
        CHECK(move == Move{move.slot, move.slot});
        CHECK(topology.link(rank, move.slot) == Link::inter_node);
        CHECK(std::erase(held, move.slot) == 1);
      }
      CHECK(held == std::vector<int>{rank});
      std::vector<int> all(static_cast<std::size_t>(topology.size()));
      std::iota(all.begin(), all.end(), 0);
      std::sort(slots.begin(), slots.end());
      std::sort(from_shards.begin(), from_shards.end());
      CHECK(slots == all);
      CHECK(from_shards == all);
      // With two hops, the first sends only the own slot between nodes, the second nothing.
      if (!topology.is_hierarchical()) continue;
      const auto hops = topology.gather_hops(rank);
      for (const Move& move : hops[0].sends) CHECK(move.slot == rank);
      for (const Move& move : hops[1].sends) CHECK(topology.same_node(rank, move.peer));
    }
  }
}

TEST_CASE("routes: a reduction in two hops meets all ranks of a node, then all nodes") {
  const Topology topology(std::vector<int>{0, 0, 1, 1, 2, 2});
  const auto hops = topology.reduce_hops(2);
  CHECK(hops[0].sends == std::vector<Move>{{3, 1}, {3, 3}, {3, 5}});
  CHECK(hops[0].recvs == std::vector<Move>{{3, 0}, {3, 2}, {3, 4}});
  CHECK(hops[1].sends == std::vector<Move>{{0, 0}, {4, 4}});
  CHECK(hops[1].recvs == std::vector<Move>{{0, 2}, {4, 2}});
  CHECK(topology.residual_owners(2) == std::vector<int>{0, 4});
  CHECK(topology.peers(2) == std::vector<int>{0, 3, 4});
  CHECK(topology.node_peers(2) == std::vector<int>{3});

  const Topology uneven(std::vector<int>{0, 0, 0, 1});
  CHECK(slots_of(uneven.reduce_hops(1)[0].sends) == std::vector<int>{0, 2, 3});
  CHECK(uneven.reduce_hops(1)[1].sends.empty());
  CHECK(uneven.residual_owners(1) == std::vector<int>{3});
  CHECK(Topology(std::vector<int>{5, 5, 5}).residual_owners(1) == std::vector<int>{0, 2});
}

}  // namespace zcomm
