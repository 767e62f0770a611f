// Messages of lossless gathers between nodes: a header and a body for each chunk of a shard.
#pragma once

#include <memory>
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

// Returns the longest message. Whole values take no more than their longest difference.
inline std::size_t most_bytes(std::int64_t num_elements) {
  return kLosslessHeaderBytes + max_lossless_bytes(num_elements);
}

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

// Makes messages that are encoded when they are listed. Their receivers have room for the longest ones.
std::unique_ptr<LosslessMessages> make_messages(const Resources& r, const LosslessShard& shard);

}  // namespace zcomm
