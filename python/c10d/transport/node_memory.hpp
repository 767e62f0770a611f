// Memory that the ranks of a node share: anonymous files (memfd), which are gone when their processes are.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "c10d/base/pointers.hpp"
#include "transport/memory_channels.hpp"
#include "zcomm/topology.hpp"

namespace zcomm::c10d_binding {

class NodeMemory {
 public:
  // Meets the other ranks of the node in `store`, which all ranks call. Returns null on all ranks of the node if one of
  // them does not share its memory, and then sets `why_not`: also if the rank is alone. Throws TransportError that
  // names a rank that has ended or does not come within `limit`, or half a minute; and soon after `is_over()`.
  static std::unique_ptr<NodeMemory> meet(const StorePtr& store, const Topology& topology, int rank,
                                          std::chrono::milliseconds limit, const std::function<bool()>& is_over,
                                          std::string& why_not);
  // Tells whether ranks cannot share memory for this reason, or somebody has turned it off: nobody has to hear of it.
  static bool is_expected(const std::string& why_not);
  ~NodeMemory();

  MemoryChannels& channels() { return *channels_; }
  // Returns the local rank of a rank of this node, or -1.
  int local_rank(int rank) const { return topology_.same_node(rank, rank_) ? topology_.local_rank(rank) : -1; }
  int rank_of(int local_rank) const { return topology_.rank_of(topology_.node(rank_), local_rank); }
  // Returns one of these local ranks' ranks whose process has ended, or -1.
  int find_ended(std::span<const int> local_ranks) const;

 private:
  NodeMemory(Topology topology, int rank);

  // Makes the outbox of this rank. Returns the text by which peers open it, as long as its file is open.
  std::string make_outbox();
  // Maps the outbox of a peer, as its text says. Throws TransportError if its process has ended, another exception if
  // that is not its memory.
  void open(int peer, const std::string& text);
  void close_file();

  const Topology topology_;
  const int rank_;
  std::vector<int> processes_;   // pidfd by local rank; -1 of this one
  const std::size_t num_bytes_;  // of an outbox, with its token
  int file_ = -1;                // descriptor of this rank's outbox, until all peers have opened it; else -1
  std::vector<std::byte*> outboxes_;
  std::unique_ptr<MemoryChannels> channels_;
};

}  // namespace zcomm::c10d_binding
