// Topology: the ranks of each node, which share a fast link, and the messages that collectives route between ranks.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zcomm/link.hpp"

namespace zcomm {

// One wire in a message. `slot` is the rank that owns the slot: a gather sends its values, a reduction a part of its
// sum.
struct Move {
  int peer;  // destination or source
  int slot;
  friend bool operator==(const Move&, const Move&) = default;
};

// Sends and receives of one rank in one hop, in order. Moves between two ranks have the same order on both.
struct Hop {
  std::vector<Move> sends;
  std::vector<Move> recvs;
};

// Nodes and routes of a group. Copies are cheap: they share their tables.
class Topology {
 public:
  // Takes the node of each rank: any integers, in any order. Throws ArgumentError if empty.
  explicit Topology(std::span<const int> node_ids);

  int size() const { return static_cast<int>(tables_->node_of.size()); }
  int num_nodes() const { return static_cast<int>(tables_->ranks.size()); }
  // Nodes are numbered by their lowest rank; local ranks ascend with the rank.
  int node(int rank) const { return tables_->node_of[static_cast<std::size_t>(rank)]; }
  int local_rank(int rank) const { return tables_->local_rank[static_cast<std::size_t>(rank)]; }
  std::span<const int> ranks(int node) const { return tables_->ranks[static_cast<std::size_t>(node)]; }
  int rank_of(int node, int local_rank) const { return ranks(node)[static_cast<std::size_t>(local_rank)]; }
  bool same_node(int a, int b) const { return node(a) == node(b); }
  Link link(int a, int b) const { return same_node(a, b) ? Link::intra_node : Link::inter_node; }

  // Tells whether two hops serve the topology: several nodes of the same size, more than one rank in each. All others
  // are flat.
  bool is_hierarchical() const { return tables_->is_hierarchical; }

  // Returns the ranks per node in node order, for messages: "2x4", or "3+1" if uneven.
  std::string to_string() const;

  // --- Routing. A flat topology has one hop, from any rank to any other; the second hop is empty.

  // Returns, ascending, the ranks that `rank` exchanges bytes with in gathers and reductions; those of them in its
  // node; all ranks but `rank`.
  std::vector<int> peers(int rank) const;
  std::vector<int> node_peers(int rank) const;
  std::vector<int> others(int rank) const;

  // Returns the hops of an all_gather. Hierarchical: own slots go to the ranks of equal local rank in other nodes and
  // to the other ranks of the node, then slots of other nodes go to the other ranks of the node. `in_one_hop`: as if
  // flat.
  std::array<Hop, 2> gather_hops(int rank, bool in_one_hop = false) const;

  // Returns the hops of a reduce_scatter; `slot` is the owner of the sum. Hierarchical: slots go to the local rank of
  // their owner within the node, one slot per node, in node order; then the sums go to their owners in other nodes.
  std::array<Hop, 2> reduce_hops(int rank) const;

  // Returns the rank of `node` that keeps the wire of `slot` in its secondary shard (hpZ of ZeRO++, arXiv 2306.10209).
  // Its local rank is that of the slot's owner, modulo the ranks of the node.
  int holder(int node, int slot) const;
  // Returns the hop of a gather from secondary shards: within the node, from the holders. Moves to a peer are adjacent.
  // The own slot comes first; without `with_own` it is left out.
  Hop secondary_hop(int rank, bool with_own = true) const;
  // Returns the first hop of a lossless gather: the own slot goes to its holders in other nodes. secondary_hop()
  // follows.
  Hop holder_hop(int rank) const;

  // Returns, ascending, the owners of the slots that error feedback has a residual of: all slots that `rank` encodes
  // for other nodes or, in a single node, encodes at all.
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
};

// Default size of a chunk, in bytes of values of a shard: large enough for a message to fill its link, small enough for
// the hops and the codec to overlap.
inline constexpr std::size_t kDefaultChunkBytes = std::size_t{1} << 20;

// A rank, its group's topology and its chunk size. Every plan is made for one.
struct World {
  Topology topology;
  int rank = 0;
  std::size_t chunk_bytes = kDefaultChunkBytes;  // bytes of values, per slot and chunk
};

}  // namespace zcomm
