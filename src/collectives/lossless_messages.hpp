// Messages of lossless gathers between nodes: a header and a body for each chunk of a shard.
//
// NCCL needs the length of a message on both hosts. So gathers are prepared: differences are encoded ahead of them, and
// the headers of many are exchanged together. This blocks the host once for all. Other transports take a limit, and
// need no preparation.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "kept_hashes.hpp"
#include "message.hpp"

namespace zcomm {

// Shard of a lossless gather, and the kept values that its difference refers to.
struct LosslessShard {
  const LosslessPlan& plan;
  ConstTensorView shard;
  Kept& kept;

  ConstTensorView values(std::int64_t chunk) const {
    return shard.slice(plan.chunk(chunk).begin, plan.chunk(chunk).count);
  }
  // Makes the job that encodes a chunk and keeps it, without a message.
  EncodeLossless encoding(std::int64_t chunk, std::uint64_t base) const {
    const KeptChunk own = kept_chunk(plan, kept, plan.rank(), chunk);
    return {.values = values(chunk), .base = own.values, .generation = base, .hash = own.hash};
  }
  // Makes Kept::hashes, at the first gather.
  void make_hashes(const Resources& r) const {
    if (kept.hashes == nullptr) kept.hashes = std::make_shared<KeptHashes>(*r.codec.lossless(), plan);
  }
};

// Messages of one gather, chunk after chunk.
class LosslessMessages {
 public:
  LosslessMessages(std::uint64_t base_generation, StreamView stream_of_memory)
      : base(base_generation), stream(stream_of_memory) {}
  virtual ~LosslessMessages() = default;
  LosslessMessages(const LosslessMessages&) = delete;
  LosslessMessages& operator=(const LosslessMessages&) = delete;

  // Returns the bytes of the longest message that may arrive.
  virtual std::size_t longest() const = 0;
  // Lists the transfers of a chunk, and keeps its values. Messages of other owners go to `received`.
  virtual void list(const Resources& r, std::int64_t chunk, const MessageBuffers& received, std::vector<Send>& sends,
                    std::vector<Recv>& recvs) = 0;
  // Returns the bytes of the message that has arrived from an owner: of recvs of the plan's hop between nodes.
  virtual std::size_t received_bytes(std::size_t owner, std::int64_t chunk, const std::byte* message) const = 0;

  const std::uint64_t base;              // the generation that differences refer to; 0: whole values are sent
  const StreamView stream;               // that the memory belongs to
  std::size_t sent_bytes = 0;            // to each holder so far, with headers
  const std::byte* kept_from = nullptr;  // the shard, if it still has the kept values
};

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
