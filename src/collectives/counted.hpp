// Codec and transport calls with counters, timers and ranges for profilers.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "zcomm/collectives.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {

// Adds the time of a scope to a counter, and holds the scope's range, if any.
class Timed {
 public:
  explicit Timed(std::chrono::nanoseconds& total, std::shared_ptr<void> range = {})
      : range_(std::move(range)), total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Timed() { total_ += std::chrono::steady_clock::now() - start_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  const std::shared_ptr<void> range_;
  std::chrono::nanoseconds& total_;
  std::chrono::steady_clock::time_point start_;
};

inline std::shared_ptr<void> begin_range(const Resources& r, const char* name) {
  return r.begin_range == nullptr ? nullptr : r.begin_range(name);
}

inline void run_codec(const Resources& r, std::span<const Encode> jobs) {
  if (jobs.empty()) return;
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::encode"));
  r.codec.encode(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const Decode> jobs) {
  if (jobs.empty()) return;
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::decode"));
  r.codec.decode(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const DecodeSum> jobs) {
  if (jobs.empty()) return;
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::decode_sum"));
  r.codec.decode_sum(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const DecodeSumEncode> jobs) {
  if (jobs.empty()) return;
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::decode_sum_encode"));
  r.codec.decode_sum_encode(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const EncodeLossless> jobs) {
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::encode"));
  r.codec.lossless()->encode(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const DecodeLossless> jobs) {
  const Timed timed(r.stats.codec_time, begin_range(r, "zcomm::decode"));
  r.codec.lossless()->decode(jobs, r.stream);
}

inline void run_codec(const Resources& r, std::span<const CheckHash> jobs) {
  const Timed timed(r.stats.codec_time);
  r.codec.lossless()->check(jobs, r.stream);
}

// Returns the statistics of a hop; 0 is the collective's first.
inline HopStats& stats_of_hop(const Resources& r, std::size_t hop) { return r.stats.hops[r.first_hop + hop]; }

inline void count_sent(const Resources& r, int peer, std::size_t num_bytes, std::size_t hop = 0) {
  HopStats& of_hop = stats_of_hop(r, hop);
  const bool is_intra_node = r.world.topology.link(r.world.rank, peer) == Link::intra_node;
  (is_intra_node ? r.stats.intra_node_bytes : r.stats.inter_node_bytes) += num_bytes;
  (is_intra_node ? of_hop.intra_node_bytes : of_hop.inter_node_bytes) += num_bytes;
}

inline std::unique_ptr<Transfer> start_transfer(const Resources& r, std::span<const Send> sends,
                                                std::span<const Recv> recvs, std::size_t hop = 0) {
  for (const Send& send : sends) count_sent(r, send.peer, send.num_bytes, hop);
  const Timed timed(r.stats.transfer_time, begin_range(r, "zcomm::start_transfer"));
  return r.transport.start(sends, recvs, r.stream);
}

// Starts the transport's own all_gather of equal slots that lie side by side.
inline std::unique_ptr<Transfer> start_all_gather(const Resources& r, std::byte* slots, std::size_t slot_bytes) {
  for (int peer = 0; peer < r.transport.size(); ++peer) {
    if (peer != r.transport.rank()) count_sent(r, peer, slot_bytes);
  }
  const Timed timed(r.stats.transfer_time, begin_range(r, "zcomm::start_transfer"));
  return r.transport.all_gather(slots, slot_bytes, r.stream);
}

// Launches the transfers started since begin_group(), unless they have started at once.
inline void end_group(const Resources& r) {
  if (r.transport.starts_at_once()) return;
  const Timed timed(r.stats.transfer_time, begin_range(r, "zcomm::start_transfer"));
  r.transport.end_group(r.stream);
}

inline void wait_for_transfer(const Resources& r, Transfer& transfer, std::size_t hop = 0) {
  const Timed timed(r.stats.transfer_time, begin_range(r, "zcomm::wait_for_transfer"));
  const Timed of_hop(stats_of_hop(r, hop).wait_time);
  transfer.wait(r.stream);
}

inline void finish_transfer(const Resources& r, std::unique_ptr<Transfer>& transfer, std::size_t hop = 0) {
  wait_for_transfer(r, *transfer, hop);
  transfer.reset();
}

}  // namespace zcomm
