// Memory that the ranks of a node share: anonymous files (memfd), which are gone when their processes are.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pointers.hpp"
#include "transport/memory_channels.hpp"
#include "zcomm/topology.hpp"

namespace zcomm::c10d_binding {

class NodeMemory {
 public:
  struct WhyNot {
    std::string reason;
    bool is_surprising = false;  // on this host they could, and nobody has turned it off
  };
  // Meets the other ranks of the node in `store`, which all ranks call. Returns null on all ranks of the node if one of
  // them does not share its memory, and then sets `why_not`: also if the rank is alone. Throws TransportError that
  // names a rank that has ended or does not come within `limit`, or half a minute; and soon after `is_over()`.
  static std::unique_ptr<NodeMemory> meet(const StorePtr& store, const Topology& topology, int rank,
                                          std::chrono::milliseconds limit, const std::function<bool()>& is_over,
                                          WhyNot& why_not);
  ~NodeMemory();
  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;

  MemoryChannels& channels() { return *channels_; }
  // Returns the local rank of a rank of this node, or -1.
  int local_rank(int rank) const { return topology_.same_node(rank, rank_) ? topology_.local_rank(rank) : -1; }
  int rank_of(int local_rank) const { return topology_.rank_of(topology_.node(rank_), local_rank); }
  // Returns one of these local ranks' ranks whose process has ended, or -1.
  int find_ended(std::span<const int> local_ranks) const;

 private:
  class Mappings;
  NodeMemory(Topology topology, int rank);

  // Maps the outbox of a peer, as its text says. Throws TransportError if its process has ended, another exception if
  // that is not its memory.
  void open(Mappings& mappings, int peer, const std::string& text);

  const Topology topology_;
  const int rank_;
  std::vector<int> processes_;  // pidfd by local rank, or -1
  std::unique_ptr<MemoryChannels> channels_;
};

}  // namespace zcomm::c10d_binding
