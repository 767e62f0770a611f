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

// One wire in a message. A gather moves the values of a slot, a reduction a part of the slot's sum.
struct Move {
  int peer;  // the rank that receives the wire in a send, or sends it in a receive
  int slot;  // the rank that owns the slot
  friend bool operator==(const Move&, const Move&) = default;
};

// Sends and receives of one rank in one hop, in order.
// The moves between two ranks have the same order on both, so messages match.
struct Hop {
  std::vector<Move> sends;
  std::vector<Move> recvs;
};

// Nodes and routes of a group. Immutable; copies are cheap, because they share their tables.
//
// Requires every rank and node that you pass to exist; no function checks it.
//
// Example:
//   const Topology topology(std::vector<int>{0, 0, 1, 1});  // ranks 0 and 1 share a node, and so do 2 and 3
//   assert(topology.to_string() == "2x2" && topology.is_hierarchical());
//   assert(topology.node(3) == 1 && topology.local_rank(3) == 1);
//   assert(topology.link(1, 2) == Link::inter_node);
//   assert((topology.peers(0) == std::vector<int>{1, 2}));  // the node, and local rank 0 of the other node
class Topology {
 public:
  // Takes an identifier of the node of each rank: any integers, in any order. Ranks of equal identifiers share a node.
  // Throws ArgumentError if `node_ids` is empty.
  explicit Topology(std::span<const int> node_ids);

  // Returns the number of ranks.
  int size() const { return static_cast<int>(tables_->node_of.size()); }

  // Returns the number of nodes.
  int num_nodes() const { return static_cast<int>(tables_->ranks.size()); }

  // Returns the number of the node of `rank`. Nodes are numbered from 0 by their lowest rank.
  int node(int rank) const { return tables_->node_of[static_cast<std::size_t>(rank)]; }

  // Returns the place of `rank` in its node, from 0. Local ranks ascend with the rank.
  int local_rank(int rank) const { return tables_->local_rank[static_cast<std::size_t>(rank)]; }

  // Returns the ranks of a node, ascending. The span stays valid as long as any copy of this topology.
  std::span<const int> ranks(int node) const { return tables_->ranks[static_cast<std::size_t>(node)]; }

  // Returns the rank at a place in a node.
  int rank_of(int node, int local_rank) const { return ranks(node)[static_cast<std::size_t>(local_rank)]; }

  // Returns true if both ranks are in one node.
  bool same_node(int a, int b) const { return node(a) == node(b); }

  // Returns the link between two ranks.
  Link link(int a, int b) const { return same_node(a, b) ? Link::intra_node : Link::inter_node; }

  // Returns true if gathers and reductions take two hops.
  // This requires several nodes of the same size, with more than one rank in each. Other topologies are flat.
  bool is_hierarchical() const { return tables_->is_hierarchical; }

  // Returns the ranks per node in node order, for messages: "2x4" for two nodes of four ranks, "3+1" for uneven ones.
  std::string to_string() const;

  // Returns the ranks that `rank` exchanges bytes with in gathers and reductions, ascending. `rank` is not among them.
  // They are all other ranks if the topology is flat. Otherwise they are the ranks of the node, and the ranks of the
  // same local rank in other nodes.
  std::vector<int> peers(int rank) const;

  // Returns the other ranks of the node of `rank`, ascending.
  std::vector<int> node_peers(int rank) const;

  // Returns all ranks but `rank`, ascending.
  std::vector<int> others(int rank) const;

  // --- Internal: routes, which plans read. A flat topology has one hop, from any rank to any other; the second is
  // empty.

  // Returns the hops of an all_gather. With `in_one_hop` there is one, as in a flat topology.
  // In the first of two hops a rank sends its own slot to its node, and to its local rank in other nodes.
  // In the second it forwards the slots of other nodes inside its node.
  std::array<Hop, 2> gather_hops(int rank, bool in_one_hop = false) const;

  // Returns the hops of a reduce_scatter. Move::slot is the owner of the sum.
  // In the first of two hops slots go to the local rank of their owner within the node: one per node, in node order.
  // In the second the sums go to their owners in other nodes.
  std::array<Hop, 2> reduce_hops(int rank) const;

  // Returns the rank of `node` that keeps the wire of `slot` in its secondary shard (hpZ of ZeRO++, arXiv 2306.10209).
  // Its local rank is the local rank of the slot's owner, modulo the ranks of the node.
  int holder(int node, int slot) const;

  // Returns the hop of a gather from secondary shards: within the node, from the holders.
  // Moves to a peer are adjacent. The own slot comes first, and is left out if `with_own` is false.
  Hop secondary_hop(int rank, bool with_own = true) const;

  // Returns the first hop of a lossless gather: the own slot goes to its holders in other nodes.
  // secondary_hop() follows it.
  Hop holder_hop(int rank) const;

  // Returns the owners of the slots for which error feedback keeps a residual, ascending.
  // They own the slots that `rank` encodes for other nodes or, in a single node, all slots that it encodes.
  std::vector<int> residual_owners(int rank) const;

  // Returns true if both have the same nodes.
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

// Default size of a chunk: 1 MiB of values of one slot.
// It is large enough for a message to fill its link, and small enough for the hops and the codec to overlap.
// On GPUs kDefaultGpuChunkBytes is better.
inline constexpr std::size_t kDefaultChunkBytes = std::size_t{1} << 20;

// A rank, its group's topology and its chunk size. Every plan is made for one world.
// A plan throws ArgumentError on a rank outside the topology and on a chunk size of 0.
struct World {
  Topology topology;
  int rank = 0;                                  // of this process or thread
  std::size_t chunk_bytes = kDefaultChunkBytes;  // bytes of values per slot and chunk; the same on all ranks
};

}  // namespace zcomm
