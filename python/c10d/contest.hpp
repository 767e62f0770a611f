// Which way to carry out calls of one kind is the fastest: the rule of policy="auto". Ranks that put in the same
// numbers decide alike: it counts in integers. Torch-free: it builds alone for its test.
#pragma once

#include <cstdint>
#include <vector>

namespace zcomm {

inline constexpr int kLeastGainPercent = 3;  // of the faster time; below it calls stay exact, or in two hops

// A call each way, in nanoseconds: of the slowest rank.
struct Round {
  std::int64_t exact = 0;
  std::int64_t compressed = 0;  // in two hops, where the topology has them
  std::int64_t one_hop = 0;     // compressed as well; 0: it is not another way

  bool gains() const;       // the faster compressed way does, over the exact one
  bool is_one_hop() const;  // that way is the one in one hop
};

// Rounds until they suffice. The first one is not counted: it connects ranks and touches fresh memory.
class Contest {
 public:
  void add(Round round);

  // 50 rounds were counted, or 3 that took 0.3 s, or any that took 2 s.
  bool is_over() const;
  // Of the counted rounds, each way for itself.
  Round medians() const;
  int num_counted() const { return static_cast<int>(counted_.size()); }

 private:
  bool is_warm_ = false;
  std::vector<Round> counted_;
  std::int64_t total_ = 0;
};

}  // namespace zcomm
