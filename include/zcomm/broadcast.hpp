// Broadcast: every rank gets the values of one rank, the root.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "zcomm/dtype.hpp"
#include "zcomm/operation.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// Plan of a broadcast. The root encodes its values once, and the wires travel from node to node in a chain: each node
// sends and receives them once. In every node the first rank to have them, its head, passes them to the others.
class BroadcastPlan {
 public:
  // Throws ArgumentError.
  BroadcastPlan(World world, int root, std::int64_t num_elements, DType dtype, BlockFormat format);

  const World& world() const { return world_; }
  std::int64_t num_elements() const { return num_elements_; }
  DType dtype() const { return dtype_; }
  BlockFormat format() const { return format_; }
  // Returns the call in words that ranks compare.
  const std::string& description() const { return description_; }

  LinkBytes bytes() const;

  // --- For the collective itself

  int root() const { return root_; }
  bool is_exact() const { return format_.kind == ElementKind::exact; }
  bool is_root() const { return world_.rank == root_; }
  // Returns the rank that the wires come from; none sends to the root.
  int source() const { return source_; }
  // Returns the ranks that this one sends to: the head of the next node first.
  const std::vector<int>& targets() const { return targets_; }
  std::int64_t chunk_elements() const { return chunk_elements_; }
  std::int64_t num_chunks() const { return (num_elements_ + chunk_elements_ - 1) / chunk_elements_; }
  std::size_t num_bytes(std::int64_t chunk) const;

 private:
  World world_;
  int root_;
  std::int64_t num_elements_;
  DType dtype_;
  BlockFormat format_;
  std::string description_;
  int source_;
  std::vector<int> targets_;
  std::int64_t chunk_elements_;
};

// Makes a broadcast of the root's one output to the outputs of all ranks, without an input: the same bits on every
// rank. A lossy format rounds the root's own values, too.
OperationPtr make_broadcast(BroadcastPlan plan);

}  // namespace zcomm
