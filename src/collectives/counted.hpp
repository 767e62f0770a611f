// Codec and transport calls with counters, timers and ranges for profilers.
#pragma once

#include <chrono>
#include <memory>
#include <span>

#include "zcomm/collectives.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {

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

}  // namespace zcomm
