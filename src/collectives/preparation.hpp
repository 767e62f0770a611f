// Preparation of lossless gathers: encodes their differences ahead of them, and exchanges headers.
//
// NCCL needs the length of a message on both hosts. So the headers of many gathers are exchanged together, which blocks
// the host once for all. Other transports take a limit, and need no preparation.
#pragma once

#include <map>
#include <memory>
#include <span>

#include "lossless_messages.hpp"

namespace zcomm {

// Memory from which the host reads sizes, reused by all batches.
struct Readback {
  std::size_t num_bytes = 0;
  std::unique_ptr<JobMemory> memory = {};
};

// Gathers of one communicator that are prepared.
class Preparations {
 public:
  // Tells whether the communicator's transport needs them.
  explicit Preparations(bool are_needed) : are_needed_(are_needed) {}

  bool are_needed() const { return are_needed_; }
  bool is_prepared(const Kept& kept) const { return prepared_.contains(kept.hashes); }

  // Encodes at least one shard, exchanges headers, and waits for them. A shard that is prepared already is prepared
  // again as whole values, because the holders' base is not the one it was encoded for. Throws TransportError if a peer
  // prepares something else.
  void prepare(const Resources& r, std::span<const LosslessShard> shards);

  // Returns the messages of a gather. Prepares the shard if that is needed and not done; ignores it if that is done.
  std::unique_ptr<LosslessMessages> messages(const Resources& r, const LosslessShard& shard);

 private:
  // Returns and removes the messages of a prepared gather, if any.
  std::unique_ptr<LosslessMessages> take(const Kept& kept);

  const bool are_needed_;
  std::map<std::weak_ptr<KeptHashes>, std::unique_ptr<LosslessMessages>, std::owner_less<>> prepared_;
  Readback readback_;
};

}  // namespace zcomm
