// The memory that the ranks of a communicator share, whether they are threads or processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace nccl_host {

inline constexpr int kMaxRanks = 16;
// Kinds of messages: NCCL takes two algorithms for gathers, and the ring for large ones.
inline constexpr int kSendRecv = 0;
inline constexpr int kSmallAllGather = 1;
inline constexpr int kLargeAllGather = 2;
inline constexpr int kKinds = 3;
inline constexpr std::uint64_t kRingWords = 2048;

// Bytes on their way from one rank to another. The receiver comes after the sender, as with the real NCCL, and not the
// other way round: a sender learns with relaxed loads how far its receiver is, and the words are atomics that order
// nothing. So ThreadSanitizer sees who reuses memory without having waited.
struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;  // words so far
  alignas(64) std::atomic<std::uint64_t> read;
  std::atomic<std::uint64_t> words[kRingWords];
};

struct Segment {
  std::atomic<std::uint32_t> num_ranks;
  std::atomic<std::uint32_t> num_arrived;
  // Who has come to connect: the sender from, to; the receiver from, to; the rank, for each kind of collectives.
  std::atomic<bool> has_sender[kMaxRanks][kMaxRanks];
  std::atomic<bool> has_receiver[kMaxRanks][kMaxRanks];
  std::atomic<bool> has_collectives[kMaxRanks][kKinds];
  // Of the ranks that have come to split the communicator.
  std::atomic<bool> has_color[kMaxRanks];
  std::atomic<int> colors[kMaxRanks];
  std::atomic<std::uint32_t> doorbells[kMaxRanks];  // rung when there may be something to do for a rank
  Ring rings[kMaxRanks][kMaxRanks];                 // from, to

  void ring(int rank);
  // Returns after some milliseconds at the latest.
  void sleep(int rank, std::uint32_t seen);
};

// The segment of that name, made by whoever comes first. Ranks of one process get the same mapping: two of them at
// different addresses would be different memory to ThreadSanitizer.
Segment& attach(const std::string& name);
void detach(const std::string& name);
// No other process needs the name any more.
void unlink(const std::string& name);

}  // namespace nccl_host
