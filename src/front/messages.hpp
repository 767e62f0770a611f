// Sends and receives of one communicator, compressed one by one. Their wires are messages of the same communicator in
// the same group, so NCCL keeps their order, and lets the messages of a group wait for nothing but their own peers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "front/request.hpp"
#include "front/tally.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::front {

// Wire of a send or a receive.
struct Message {
  Request request;
  BlockFormat format;
  Scratch wire;
  std::size_t num_bytes;
  std::uint64_t seed;
};

class Messages {
 public:
  // Takes the nodes of the ranks, and this rank's device. Before it every message stays exact.
  void locate(const Topology& topology, int rank, int device);

  // Tells whether a message is to be compressed, and why not. Both of its ranks get the same answer.
  Reason decide(const Request& request) const;

  // Takes memory for the wire of a message that decide() compresses.
  Message take(const Request& request);

  // Calls NCCL's own function with a wire.
  static nccl::Result post(const Message& message);

  // Queues the encoding of what is sent, and the decoding of what is received, on the stream of all these messages.
  void encode(std::span<const Message* const> messages) const;
  void decode(std::span<const Message* const> messages) const;

 private:
  const BlockFormat& format_of(const Request& request) const;

  int rank_ = 0;
  int device_ = 0;
  std::optional<Topology> topology_;
  std::uint64_t seed_ = 0;                // of the last message
  std::unique_ptr<Workspace> workspace_;  // null: no message was compressed yet
  std::unique_ptr<Codec> codec_;
};

}  // namespace zcomm::front
