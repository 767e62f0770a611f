// What gathers by differences on a GPU have done before they begin: their differences are encoded, and both hosts know
// the sizes of these.
#pragma once

#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "counted.hpp"
#include "device_kept.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

// The headers of all chunks of a batch: a row for this rank, then one for each owner of a slot that it holds.
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

// Its memory is of `stream`. Without other nodes there are no headers and no bodies.
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

// Where pieces of these sizes lie, and their end.
inline std::vector<std::size_t> aligned_offsets(const std::vector<std::size_t>& sizes) {
  std::vector<std::size_t> offsets{0};
  for (const std::size_t size : sizes) offsets.push_back(offsets.back() + align_wire(size));
  return offsets;
}

// For Codec::decode, which makes many copies in one launch.
inline Decode copy_of(const std::byte* from, std::byte* to, std::size_t num_bytes) {
  constexpr DType kTwoBytes = DType::bfloat16;
  return {{from, {}, kTwoBytes}, {to, static_cast<std::int64_t>(num_bytes / element_size(kTwoBytes)), kTwoBytes}};
}

// Memory through which the host learns sizes: kept from batch to batch.
struct Readback {
  void reserve(std::size_t num_bytes);
  std::unique_ptr<PinnedBytes> memory;
  std::unique_ptr<Event> arrived;
};

// In the order of `shards`, at least one, whose KeptShards::device is there. Waits for the GPU once. `call`: what this
// rank has called in words; throws TransportError if a peer's are others.
std::list<PreparedGather> prepare_gathers(const Resources& resources, std::span<const ShardDifference> shards,
                                          const std::string& call, Readback& readback);

}  // namespace zcomm
