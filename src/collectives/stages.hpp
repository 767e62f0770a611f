// What the stages of all collectives are made of: a pipeline over chunks, counted calls of codec and transport, and
// messages.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "zcomm/call.hpp"
#include "zcomm/chunks.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

// Stages of a collective, called for each chunk.
class Stages {
 public:
  Stages() = default;
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;
  virtual ~Stages() = default;

  virtual std::int64_t num_chunks() const = 0;
  virtual int num_hops() const { return 1; }          // or 2
  virtual int second_hop_delay() const { return 1; }  // steps after the first hop
  virtual int window() const { return 1; }            // steps from the start of a chunk's last transfers to finish()
  virtual void begin() {}                          // after Transport::begin(): makes invalid what the call will write
  virtual void first_hop(std::int64_t chunk) = 0;  // starts transfers
  virtual void second_hop(std::int64_t) {}         // waits for the first hop and starts other transfers
  virtual void meanwhile(std::int64_t) {}          // work that can wait until the last transfers start
  virtual void finish(std::int64_t chunk) = 0;     // waits for the last transfers
  virtual void end() {}                            // after the last chunk

  std::shared_ptr<const void> held = {};  // owner of data that the stages refer to
  std::unique_ptr<Stages> second = {};    // those of a second collective with the same chunks
};

// Runs each stage of chunk k together with the previous stage of chunk k+1: while a stage waits for bytes of chunk k,
// those of chunk k+1 are in flight. All transfers of a step form one group of the transport: one group per chunk, and
// with two hops as many more as the second one is delayed by.
//
// A second hop that works on what it has received is best delayed by two steps: then a group is in flight meanwhile.
//
// The second collective starts a chunk when the first has finished it, while later chunks of the first are in progress.
// Their transfers share groups: n chunks take n + 2 groups, or n + 4 if both have two hops, one more if that of the
// first is delayed by two steps, and one more with lanes.
//
// With lanes the kernels of a step run side by side, and while the group of the step before is in flight. So the call
// lasts one group a step, between its first encode and its last sum.
void run_pipeline(const Resources& r, Stages& first);

// Returns the window of one hop whose chunks have `wire_bytes`, of all ranks. Between nodes, on transports that start
// transfers at once, several chunks are in flight, which keeps a far link busy.
int window_of(const Resources& r, std::size_t wire_bytes, std::int64_t num_chunks);

// Value per chunk in progress; chunks that are `depth` apart share a place. Of one hop, window() + 1 chunks are in
// progress at a time. Of two hops, second_hop_delay() + 1 are between the hops, two behind the second,
// second_hop_delay() + 2 in all.
template <class T>
class Ring {
 public:
  explicit Ring(int depth) : items_(static_cast<std::size_t>(depth)) {}
  T& operator[](std::int64_t chunk) { return items_[static_cast<std::size_t>(chunk) % items_.size()]; }

 private:
  std::vector<T> items_;
};

// Values of all slots of a call, each in one view, or in one view for each segment.
template <class View>
class SlotViews {
 public:
  SlotViews(std::span<const View> views, std::size_t num_slots) : views_(views), per_slot_(views.size() / num_slots) {}

  template <class Format>
  View operator()(int slot, const Piece<Format>& piece) const {
    const std::size_t first = static_cast<std::size_t>(slot) * per_slot_;
    if (per_slot_ == 1) return views_[first].slice(piece.begin, piece.count);
    return views_[first + piece.segment].slice(piece.in_segment, piece.count);
  }

 private:
  std::span<const View> views_;
  std::size_t per_slot_;
};

// --- Calls of the codec and the transport, with counters, timers and ranges for profilers

// Makes a call in a profiler's range, and adds its time to `total`.
template <class Call>
void timed(const Resources& r, std::chrono::nanoseconds& total, const char* name, Call&& call) {
  const std::shared_ptr<void> range = r.begin_range == nullptr ? nullptr : r.begin_range(name);
  const auto start = std::chrono::steady_clock::now();
  call();
  total += std::chrono::steady_clock::now() - start;
}

inline void run_codec(const Resources& r, std::span<const Encode> jobs) {
  if (jobs.empty()) return;
  timed(r, r.stats.codec_time, "zcomm::encode", [&] { r.codec.encode(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const Decode> jobs) {
  if (jobs.empty()) return;
  timed(r, r.stats.codec_time, "zcomm::decode", [&] { r.codec.decode(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const DecodeSum> jobs) {
  if (jobs.empty()) return;
  timed(r, r.stats.codec_time, "zcomm::decode_sum", [&] { r.codec.decode_sum(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const DecodeSumEncode> jobs) {
  if (jobs.empty()) return;
  timed(r, r.stats.codec_time, "zcomm::decode_sum_encode", [&] { r.codec.decode_sum_encode(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const EncodeLossless> jobs) {
  timed(r, r.stats.codec_time, "zcomm::encode", [&] { r.codec.lossless()->encode(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const DecodeLossless> jobs) {
  timed(r, r.stats.codec_time, "zcomm::decode", [&] { r.codec.lossless()->decode(jobs, r.stream); });
}

inline void run_codec(const Resources& r, std::span<const CheckHash> jobs) {
  timed(r, r.stats.codec_time, "zcomm::check", [&] { r.codec.lossless()->check(jobs, r.stream); });
}

// Makes a call of the codec on a lane, if there are lanes: beside the other such calls since the pipeline joined them,
// and after the transfers that were waited for.
template <class Jobs>
void run_beside(const Resources& r, const Jobs& jobs) {
  if (jobs.empty()) return;
  if (r.lanes == nullptr) return run_codec(r, jobs);
  Resources on_lane = r;
  on_lane.stream = r.lanes->fork(r.stream);
  run_codec(on_lane, jobs);
}

// `hop`: 0 is the call's first.
inline void count_sent(const Resources& r, int peer, std::size_t num_bytes, std::size_t hop = 0) {
  const Link link = r.world.topology.link(r.world.rank, peer);
  (link == Link::intra_node ? r.stats.intra_node_bytes : r.stats.inter_node_bytes) += num_bytes;
  r.stats.bytes_by_hop[hop].on(link) += num_bytes;
}

inline std::unique_ptr<Transfer> start_transfer(const Resources& r, std::span<const Send> sends,
                                                std::span<const Recv> recvs, std::size_t hop = 0) {
  for (const Send& send : sends) count_sent(r, send.peer, send.num_bytes, hop);
  std::unique_ptr<Transfer> transfer;
  timed(r, r.stats.transfer_time, "zcomm::start_transfer",
        [&] { transfer = r.transport.start(sends, recvs, r.stream); });
  return transfer;
}

// Starts the transport's own all_gather of equal slots that lie side by side.
inline std::unique_ptr<Transfer> start_all_gather(const Resources& r, std::byte* slots, std::size_t slot_bytes,
                                                  std::size_t hop) {
  for (int peer = 0; peer < r.transport.size(); ++peer) {
    if (peer != r.transport.rank()) count_sent(r, peer, slot_bytes, hop);
  }
  std::unique_ptr<Transfer> transfer;
  timed(r, r.stats.transfer_time, "zcomm::start_transfer",
        [&] { transfer = r.transport.all_gather(slots, slot_bytes, r.stream); });
  return transfer;
}

inline void wait_for_transfer(const Resources& r, Transfer& transfer, std::size_t hop = 0) {
  const std::chrono::nanoseconds before = r.stats.transfer_time;
  timed(r, r.stats.transfer_time, "zcomm::wait_for_transfer", [&] { transfer.wait(r.stream); });
  r.stats.wait_time[hop] += r.stats.transfer_time - before;
}

inline void finish_transfer(const Resources& r, std::unique_ptr<Transfer>& transfer, std::size_t hop = 0) {
  wait_for_transfer(r, *transfer, hop);
  transfer.reset();
}

// --- Messages, which hold the wires of a chunk's pieces back to back

// Returns the elements of a chunk where all ranks cut values of any length alike: whole blocks of `granule`.
inline std::int64_t chunk_elements(const World& world, DType dtype, std::int64_t granule) {
  const std::int64_t most = max_chunk(world.topology.size(), 0, dtype, 2 * kPartsPerHop);
  const std::int64_t wanted = bounded_chunk(world.chunk_bytes, most, dtype);
  return std::max<std::int64_t>(wanted / granule, 1) * granule;
}

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
    places_.resize(static_cast<std::size_t>(num_peers_) * static_cast<std::size_t>(depth_));
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
