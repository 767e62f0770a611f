// Which ranks share a node, that is, a fast link; and with that, who sends what to whom.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zcomm/link.hpp"

namespace zcomm {

// One wire on its way. `slot` is the rank whose slot it is: who gathers from it, or whose sum it is a part of.
struct Move {
  int peer;  // where it goes, or comes from
  int slot;
  friend bool operator==(const Move&, const Move&) = default;
};

// What one rank sends and receives at a time, in the order in which it does. Moves between the same two ranks have the
// same order on both.
struct Hop {
  std::vector<Move> sends;
  std::vector<Move> recvs;
};

// Copies share what they hold, and are cheap.
class Topology {
 public:
  // node_ids[r] names the node of rank r: any integers, in any order. Throws ArgumentError if empty.
  explicit Topology(std::span<const int> node_ids);

  int size() const { return static_cast<int>(tables_->node_of.size()); }
  int num_nodes() const { return static_cast<int>(tables_->ranks.size()); }
  // Nodes are numbered by their lowest rank, local ranks ascend with the rank.
  int node(int rank) const { return tables_->node_of[static_cast<std::size_t>(rank)]; }
  int local_rank(int rank) const { return tables_->local_rank[static_cast<std::size_t>(rank)]; }
  std::span<const int> ranks(int node) const { return tables_->ranks[static_cast<std::size_t>(node)]; }
  int rank_of(int node, int local_rank) const { return ranks(node)[static_cast<std::size_t>(local_rank)]; }
  bool same_node(int a, int b) const { return node(a) == node(b); }
  Link link(int a, int b) const { return same_node(a, b) ? Link::intra_node : Link::inter_node; }

  // Several nodes of the same size, more than one rank in each: the case that two hops serve. All others are flat.
  bool is_hierarchical() const { return tables_->is_hierarchical && !in_one_hop_; }
  // The same ranks and nodes, and equal to this one, but flat.
  Topology in_one_hop() const;
  bool is_made_flat() const { return tables_->is_hierarchical && in_one_hop_; }

  // Ranks per node in node order, for messages: "2x4", or "3+1" if uneven.
  std::string to_string() const;

  // --- Routing. Flat: one hop, straight between any two ranks; the second hop is empty.

  // The ranks that `rank` exchanges bytes with in some collective that is not direct, ascending, and those of them in
  // its node; and all ranks but `rank`.
  std::vector<int> peers(int rank) const;
  std::vector<int> node_peers(int rank) const;
  std::vector<int> others(int rank) const;

  // all_gather. Hierarchical: own slots go to the ranks of equal local rank in other nodes and to those of the own
  // node, then slots of other nodes go to the ranks of the own node.
  std::array<Hop, 2> gather_hops(int rank) const;

  // reduce_scatter: `slot` is whom the values are summed for. Hierarchical: inside the node to the local rank of their
  // owners, one slot of each node, in node order, to each; then the sums to their owners in other nodes.
  std::array<Hop, 2> reduce_hops(int rank) const;
  // Straight to the owners, whatever the nodes.
  Hop direct_hop(int rank) const;

  // Which rank of a node keeps the wire of `slot` in its secondary shard (hpZ of ZeRO++, arXiv 2306.10209): the one
  // with the local rank of the slot's owner, modulo the ranks of the node.
  int holder(int node, int slot) const;
  // gather_secondary: inside the node, from the holders.
  Hop secondary_hop(int rank) const;
  // all_gather by differences: the own slot to its holders in other nodes. Then comes secondary_hop().
  Hop holder_hop(int rank) const;

  // Whose slots error feedback has a residual of, ascending: what `rank` encodes for other nodes, or, in a single node,
  // encodes at all.
  std::vector<int> residual_owners(int rank) const;

  friend bool operator==(const Topology& a, const Topology& b) {
    return a.tables_ == b.tables_ || a.tables_->node_of == b.tables_->node_of;
  }

 private:
  struct Tables {
    std::vector<int> node_of;
    std::vector<int> local_rank;
    std::vector<std::vector<int>> ranks;
    bool is_hierarchical = false;
  };
  std::shared_ptr<const Tables> tables_;
  bool in_one_hop_ = false;
};

}  // namespace zcomm
