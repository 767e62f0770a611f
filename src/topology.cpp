#include "zcomm/topology.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

bool are_equal(const std::vector<std::vector<int>>& nodes) {
  return std::all_of(nodes.begin(), nodes.end(),
                     [&](const auto& members) { return members.size() == nodes.front().size(); });
}

}  // namespace

Topology::Topology(std::span<const int> node_ids) {
  check_argument(!node_ids.empty(), "node_ids: expected the node of every rank, got none");
  Tables tables;
  std::map<int, int> number_of;  // given id -> consecutive number
  for (int rank = 0; rank < static_cast<int>(node_ids.size()); ++rank) {
    const int id = node_ids[static_cast<std::size_t>(rank)];
    const int node = number_of.try_emplace(id, static_cast<int>(number_of.size())).first->second;
    if (static_cast<std::size_t>(node) == tables.ranks.size()) tables.ranks.emplace_back();
    auto& members = tables.ranks[static_cast<std::size_t>(node)];
    tables.node_of.push_back(node);
    tables.local_rank.push_back(static_cast<int>(members.size()));
    members.push_back(rank);
  }
  tables.is_hierarchical = tables.ranks.size() > 1 && tables.ranks.front().size() > 1 && are_equal(tables.ranks);
  tables_ = std::make_shared<const Tables>(std::move(tables));
}

std::string Topology::to_string() const {
  const auto& nodes = tables_->ranks;
  if (are_equal(nodes)) return std::to_string(nodes.size()) + "x" + std::to_string(nodes.front().size());
  std::string text;
  for (const auto& members : nodes) text += (text.empty() ? "" : "+") + std::to_string(members.size());
  return text;
}

std::vector<int> Topology::peers(int rank) const {
  std::vector<int> peers = others(rank);
  std::erase_if(peers, [&](int peer) {
    return is_hierarchical() && !same_node(rank, peer) && local_rank(rank) != local_rank(peer);
  });
  return peers;
}

std::vector<int> Topology::others(int rank) const {
  std::vector<int> others(static_cast<std::size_t>(size()));
  std::iota(others.begin(), others.end(), 0);
  std::erase(others, rank);
  return others;
}

std::vector<int> Topology::node_peers(int rank) const {
  const std::span<const int> members = ranks(node(rank));
  std::vector<int> peers(members.begin(), members.end());
  std::erase(peers, rank);
  return peers;
}

std::array<Hop, 2> Topology::gather_hops(int rank, bool in_one_hop) const {
  std::array<Hop, 2> hops;
  const auto exchange = [&](int peer) {
    hops[0].sends.push_back({peer, rank});
    hops[0].recvs.push_back({peer, peer});
  };
  if (in_one_hop || !is_hierarchical()) {
    for (int shift = 1; shift < size(); ++shift) exchange((rank + shift) % size());
    return hops;
  }
  for (int other = 0; other < num_nodes(); ++other) {
    if (other != node(rank)) exchange(rank_of(other, local_rank(rank)));
  }
  for (const int peer : node_peers(rank)) exchange(peer);
  hops[1] = secondary_hop(rank, /*with_own=*/false);
  return hops;
}

std::array<Hop, 2> Topology::reduce_hops(int rank) const {
  std::array<Hop, 2> hops;
  if (!is_hierarchical()) {
    for (int shift = 1; shift < size(); ++shift) {
      const int to = (rank + shift) % size();
      hops[0].sends.push_back({to, to});
      hops[0].recvs.push_back({(rank - shift + size()) % size(), rank});
    }
    return hops;
  }
  const int own_node = node(rank);
  const int own_local = local_rank(rank);
  const int node_size = static_cast<int>(ranks(own_node).size());
  for (int shift = 1; shift < node_size; ++shift) {
    const int to = (own_local + shift) % node_size;
    const int from = (own_local - shift + node_size) % node_size;
    for (int other = 0; other < num_nodes(); ++other) {
      hops[0].sends.push_back({rank_of(own_node, to), rank_of(other, to)});
      hops[0].recvs.push_back({rank_of(own_node, from), rank_of(other, own_local)});
    }
  }
  for (int other = 0; other < num_nodes(); ++other) {
    if (other == own_node) continue;
    const int peer = rank_of(other, own_local);
    hops[1].sends.push_back({peer, peer});
    hops[1].recvs.push_back({peer, rank});
  }
  return hops;
}

int Topology::holder(int of_node, int slot) const {
  const std::span<const int> members = ranks(of_node);
  return members[static_cast<std::size_t>(local_rank(slot)) % members.size()];
}

Hop Topology::secondary_hop(int rank, bool with_own) const {
  Hop hop;
  for (const int peer : node_peers(rank)) {
    if (with_own) {
      hop.sends.push_back({peer, rank});
      hop.recvs.push_back({peer, peer});
    }
    for (int slot = 0; slot < size(); ++slot) {
      if (same_node(slot, rank)) continue;
      const int from = holder(node(rank), slot);
      if (from == rank) hop.sends.push_back({peer, slot});
      if (from == peer) hop.recvs.push_back({peer, slot});
    }
  }
  return hop;
}

Hop Topology::holder_hop(int rank) const {
  Hop hop;
  for (int other = 0; other < num_nodes(); ++other) {
    if (other != node(rank)) hop.sends.push_back({holder(other, rank), rank});
  }
  for (int slot = 0; slot < size(); ++slot) {
    if (!same_node(slot, rank) && holder(node(rank), slot) == rank) hop.recvs.push_back({slot, slot});
  }
  return hop;
}

std::vector<int> Topology::residual_owners(int rank) const {
  const std::array<Hop, 2> hops = reduce_hops(rank);
  std::vector<int> owners;
  for (const Move& move : hops[is_hierarchical() ? 1 : 0].sends) {
    if (num_nodes() == 1 || link(rank, move.peer) == Link::inter_node) owners.push_back(move.slot);
  }
  std::sort(owners.begin(), owners.end());
  return owners;
}

}  // namespace zcomm
