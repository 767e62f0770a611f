// Messages, which hold the wires of a chunk's pieces back to back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "zcomm/collectives.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

// Returns the place of the next wire in `message`, of num_elements values of type `dtype`, and moves `message` to its
// end. Senders and receivers take the wires of a message in the same order.
template <class Byte>
Byte* take_wire(Byte*& message, BlockFormat format, DType dtype, std::int64_t num_elements) {
  return std::exchange(message, message + wire_bytes(format, dtype, num_elements));
}

// Buffers for `num_peers` messages of each chunk in progress; `index` is one of them, not a rank.
class MessageBuffers {
 public:
  MessageBuffers(const Resources& r, int num_peers, std::size_t message_bytes, int depth)
      : num_peers_(num_peers),
        depth_(depth),
        message_bytes_(message_bytes),
        scratch_(r.workspace, message_bytes * static_cast<std::size_t>(num_peers) * static_cast<std::size_t>(depth),
                 r.stream) {}

  std::byte* data(int index, std::int64_t chunk) const {
    return scratch_.data() + place(index, chunk) * message_bytes_;
  }

  // Returns the receive of a message from `rank`, which the transport may leave elsewhere. Where received() has it may
  // change in any wait of this rank.
  Recv recv(int rank, int index, std::int64_t chunk, std::size_t num_bytes) {
    places_.resize(static_cast<std::size_t>(num_peers_ * depth_));
    const std::byte*& received = places_[place(index, chunk)];
    received = data(index, chunk);
    return {rank, data(index, chunk), num_bytes, false, &received};
  }
  const std::byte* received(int index, std::int64_t chunk) const { return places_[place(index, chunk)]; }

 private:
  // Returns the number of a buffer among all.
  std::size_t place(int index, std::int64_t chunk) const {
    return static_cast<std::size_t>((chunk % depth_) * num_peers_ + index);
  }

  int num_peers_;
  int depth_;
  std::size_t message_bytes_;
  Scratch scratch_;
  std::vector<const std::byte*> places_;  // where messages of recv() are
};

}  // namespace zcomm
