// What the collectives share: stages, and counted codec and transport calls.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "chunks.hpp"
#include "zcomm/collectives.hpp"

namespace zcomm {

// Runs stage s of chunk k after stage s of chunk k-1 and stage s-1 of chunk k, later stages of earlier chunks last:
// when a stage waits for bytes of chunk k, those of chunk k+1 are already under way.
template <class... Stages>
void run_pipeline(std::int64_t num_chunks, Stages&&... stages) {
  constexpr std::int64_t kNumStages = sizeof...(Stages);
  for (std::int64_t step = 0; step < num_chunks + kNumStages - 1; ++step) {
    std::int64_t chunk = step;
    const auto run = [&](auto& stage) {
      if (chunk >= 0 && chunk < num_chunks) stage(chunk);
      --chunk;
    };
    (run(stages), ...);
  }
}

// One value per chunk that is under way; chunks that are `Depth` apart share a place.
template <class T, int Depth>
class Ring {
 public:
  T& operator[](std::int64_t chunk) { return items_[static_cast<std::size_t>(chunk % Depth)]; }

 private:
  std::array<T, Depth> items_{};
};

// Adds the time of a scope to a counter.
class Timed {
 public:
  explicit Timed(std::chrono::nanoseconds& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Timed() { total_ += std::chrono::steady_clock::now() - start_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::chrono::nanoseconds& total_;
  std::chrono::steady_clock::time_point start_;
};

// The random bits of a piece of the slot of `owner`: others for each call, rank, slot and segment. (splitmix64, Steele
// et al., OOPSLA 2014.)
template <class Format>
Rounding rounding_of(const Resources& r, int owner, const Piece<Format>& piece, BlockFormat format) {
  if (!format.stochastic) return {};
  const auto mix = [](std::uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  std::uint64_t seed = mix(r.seed);
  seed = mix(seed ^ static_cast<std::uint64_t>(r.transport.rank()));
  seed = mix(seed ^ static_cast<std::uint64_t>(owner));
  return {mix(seed ^ piece.segment), piece.in_segment};
}

inline std::unique_ptr<Transfer> start_transfer(const Resources& r, std::span<const Send> sends,
                                                std::span<const Recv> recvs) {
  const int rank = r.transport.rank();
  for (const Send& send : sends) {
    (r.topology.same_node(rank, send.peer) ? r.stats.inside_bytes : r.stats.between_bytes) += send.num_bytes;
  }
  const Timed timed(r.stats.transfer_time);
  return r.transport.start(sends, recvs, r.stream);
}

// The transport's own all_gather, of slots that are equal and lie side by side.
inline std::unique_ptr<Transfer> start_all_gather(const Resources& r, std::byte* slots, std::size_t slot_bytes) {
  for (int peer = 0; peer < r.transport.size(); ++peer) {
    if (peer == r.transport.rank()) continue;
    (r.topology.same_node(r.transport.rank(), peer) ? r.stats.inside_bytes : r.stats.between_bytes) += slot_bytes;
  }
  const Timed timed(r.stats.transfer_time);
  return r.transport.all_gather(slots, slot_bytes, r.stream);
}

inline void finish_transfer(const Resources& r, std::unique_ptr<Transfer>& transfer) {
  const Timed timed(r.stats.transfer_time);
  transfer->wait(r.stream);
  transfer.reset();
}

}  // namespace zcomm
