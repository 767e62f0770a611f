// Which ranks share a node, that is, a fast link.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace zcomm {

class Topology {
 public:
  // node_ids[r] names the node of rank r: any integers, in any order. Throws ArgumentError if empty.
  explicit Topology(std::span<const int> node_ids);

  int size() const { return static_cast<int>(node_of_.size()); }
  int num_nodes() const { return static_cast<int>(ranks_.size()); }
  // Nodes are numbered by their lowest rank, local ranks ascend with the rank.
  int node(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  int local_rank(int rank) const { return local_rank_[static_cast<std::size_t>(rank)]; }
  std::span<const int> ranks(int node) const { return ranks_[static_cast<std::size_t>(node)]; }
  bool same_node(int a, int b) const { return node(a) == node(b); }

  // Several nodes of the same size, more than one rank in each: the case that two hops serve. All others are flat.
  bool is_hierarchical() const;

  // Ranks per node in node order, for messages: "2x4", or "3+1" if uneven.
  std::string to_string() const;

 private:
  std::vector<int> node_of_;
  std::vector<int> local_rank_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace zcomm
