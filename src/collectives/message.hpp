// Messages, which hold the wires of a chunk's pieces back to back, and the terms of sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/collectives.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

// Allocates the wires of a message that this rank fills.
class MessageWriter {
 public:
  // Takes the `dtype` of the encoded values.
  MessageWriter(std::byte* message, DType dtype) : message_(message), dtype_(dtype) {}

  // Returns the place of the next num_elements values in `format`.
  std::byte* next(BlockFormat format, std::int64_t num_elements) {
    std::byte* const wire = message_ + num_bytes_;
    num_bytes_ += wire_bytes(format, dtype_, num_elements);
    return wire;
  }

  std::size_t num_bytes() const { return num_bytes_; }
  Send send(int peer) const { return {peer, message_, num_bytes_}; }

 private:
  std::byte* message_;
  DType dtype_;
  std::size_t num_bytes_ = 0;
};

// Reads the wires of a received message, in the order in which its sender wrote them.
class MessageReader {
 public:
  MessageReader(const std::byte* message, DType dtype) : message_(message), dtype_(dtype) {}

  Wire next(BlockFormat format, std::int64_t num_elements) {
    const Wire wire{message_, format, dtype_};
    message_ += wire_bytes(format, dtype_, num_elements);
    return wire;
  }

 private:
  const std::byte* message_;
  DType dtype_;
};

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
  // Returns the number of a buffer among all.
  std::size_t place(int index, std::int64_t chunk) const {
    return static_cast<std::size_t>((chunk % depth_) * num_peers_ + index);
  }

 private:
  int num_peers_;
  int depth_;
  std::size_t message_bytes_;
  Scratch scratch_;
};

// As MessageBuffers, for messages that are received: in the buffers, or where the transport leaves them.
class ReceivedMessages {
 public:
  ReceivedMessages(const Resources& r, int num_peers, std::size_t message_bytes, int depth)
      : buffers_(r, num_peers, message_bytes, depth), places_(static_cast<std::size_t>(num_peers * depth)) {}

  // Returns the receive of a message from `rank`. Where data() has it may change in any wait of this rank.
  Recv recv(int rank, int index, std::int64_t chunk, std::size_t num_bytes) {
    std::byte* const data = buffers_.data(index, chunk);
    const std::byte*& place = places_[buffers_.place(index, chunk)];
    place = data;
    return {rank, data, num_bytes, false, &place};
  }
  const std::byte* data(int index, std::int64_t chunk) const { return places_[buffers_.place(index, chunk)]; }

 private:
  MessageBuffers buffers_;
  std::vector<const std::byte*> places_;
};

// Terms of sums, one sum after another. Spans from sum() stay valid until clear(), so that jobs can hold them while
// terms are added. Chunks reuse the memory.
class TermList {
 public:
  TermList() { blocks_.emplace_back().reserve(64); }

  void clear() {
    for (std::vector<Wire>& block : blocks_) block.clear();
    current_ = first_ = 0;
  }
  void begin_sum() { first_ = blocks_[current_].size(); }
  void add(const Wire& term) {
    if (blocks_[current_].size() == blocks_[current_].capacity()) move_on();
    blocks_[current_].push_back(term);
  }
  // Returns all terms since begin_sum().
  std::span<const Wire> sum() const { return std::span(blocks_[current_]).subspan(first_); }

 private:
  // Continues the current sum in a larger block; spans of its copy here stay valid.
  void move_on() {
    const std::size_t size = 2 * blocks_[current_].capacity();
    if (current_ + 1 == blocks_.size()) blocks_.emplace_back().reserve(size);
    const std::span<const Wire> terms = sum();
    ++current_;
    first_ = 0;
    blocks_[current_].assign(terms.begin(), terms.end());
  }

  std::vector<std::vector<Wire>> blocks_;  // each twice as large as the one before; none is reallocated
  std::size_t current_ = 0;
  std::size_t first_ = 0;  // start of the sum in the current block
};

}  // namespace zcomm
