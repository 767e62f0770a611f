// Preparation of lossless gathers on a GPU: encodes the differences and exchanges their sizes with the peers.
#pragma once

#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "counted.hpp"
#include "device_kept.hpp"
#include "difference_gather.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

// Headers of all chunks of a batch: a row of this rank, then one per owner of a held slot.
struct HeaderRows {
  HeaderRows(Workspace& workspace, std::size_t row_length, std::size_t num_rows, StreamView stream)
      : length(row_length),
        num_bytes(row_length * num_rows * kDifferenceHeaderBytes),
        memory(workspace, num_bytes, stream) {}

  std::byte* row(std::size_t number) const { return memory.data() + number * length * kDifferenceHeaderBytes; }

  std::size_t length;
  std::size_t num_bytes;
  Scratch memory;
};

// Prepared gather; its memory belongs to `stream`. Without other nodes it has no headers and no bodies.
struct PreparedGather {
  std::weak_ptr<DeviceKept> kept;
  std::uint64_t base;  // the generation that its differences refer to
  StreamView stream;
  std::size_t first_header;  // in each row
  std::shared_ptr<const HeaderRows> headers = {};
  std::vector<std::size_t> sent = {};      // bytes of the body of each chunk
  std::vector<std::size_t> received = {};  // the same for each owner, one after the other
  std::unique_ptr<Scratch> bodies = {};    // at aligned_offsets(sent)
};

// Returns the offsets of pieces of these sizes, and their end.
inline std::vector<std::size_t> aligned_offsets(const std::vector<std::size_t>& sizes) {
  std::vector<std::size_t> offsets{0};
  for (const std::size_t size : sizes) offsets.push_back(offsets.back() + align_wire(size));
  return offsets;
}

// Makes a copy job for Codec::decode, which makes many copies in one launch.
inline Decode copy_of(const std::byte* from, std::byte* to, std::size_t num_bytes) {
  constexpr DType kTwoBytes = DType::bfloat16;
  return {{from, {}, kTwoBytes}, {to, static_cast<std::int64_t>(num_bytes / element_size(kTwoBytes)), kTwoBytes}};
}

// Pinned memory from which the host reads sizes, reused by all batches.
struct Readback {
  void reserve(std::size_t num_bytes);
  std::unique_ptr<PinnedBytes> memory;
  std::unique_ptr<Event> arrived;
};

// Prepares at least one shard, in order; each Kept::device must exist. Blocks on the GPU once. `call` describes this
// rank's call; throws TransportError if a peer's differs.
std::list<PreparedGather> prepare_gathers(const Resources& resources, std::span<const ShardDifference> shards,
                                          const std::string& call, Readback& readback);

}  // namespace zcomm
