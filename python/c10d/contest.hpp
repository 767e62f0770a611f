// Choice of the fastest way to carry out calls of one kind: the rule of policy="auto". It counts in integers, so that
// ranks with equal numbers decide alike. Torch-free: it builds alone for its test.
#pragma once

#include <cstdint>
#include <vector>

namespace zcomm {

inline constexpr int kLeastGainPercent = 3;  // of the faster time; below it calls stay exact, or in two hops

// Times of one call each way, in nanoseconds, of the slowest rank.
struct Round {
  std::int64_t exact = 0;
  std::int64_t compressed = 0;  // in two hops, if the topology has them
  std::int64_t one_hop = 0;     // also compressed; 0: not another way

  bool gains() const;       // the faster compressed way beats the exact one
  bool is_one_hop() const;  // one hop beats two
};

// Returns the median of each way.
Round medians_of(const std::vector<Round>& rounds);
// Returns how far the medians may be off: twice the median deviation, over the root of the number of rounds.
Round spreads_of(const std::vector<Round>& rounds);
// Tells whether a rehearsal may end: after 50 rounds, after 3 that took 0.3 s, or after 2 s.
bool suffice(const std::vector<Round>& rounds);

}  // namespace zcomm
