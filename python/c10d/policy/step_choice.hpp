// Choice between exact and compressed calls by the time that training steps take: blocks of steps make their calls in
// turn one way and the other, until the times differ by more than their spread. Calls may be hidden behind computing,
// which they slow down, so that their own times do not tell. Torch-free: it builds alone for its test.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace zcomm {

// Rule of compress="auto" for the fastest way to carry out calls of one kind. It counts in integers, so that ranks with
// equal numbers decide alike.
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

// Ranks compare where their steps end, ever more rarely: at calls that all count alike. Once they agree, a step is as
// many calls in a row, so they cannot part, wherever a step ends later. Calls in between, as of an evaluation, move the
// bounds of these steps; rounds that they fill are left out. Functions may be called by any thread. Groups of a process
// have their trials one after another. Two that change the way at the same steps would each have the times of both.
class StepChoice {
 public:
  StepChoice() = default;
  ~StepChoice() { give_back_turn(); }

  static constexpr std::int64_t kBlockSteps = 4;  // the first of each block, in which the way changes, is not counted
  static constexpr int kFewestRounds = 4;         // of a block each way
  static constexpr int kMostRounds = 12;
  static constexpr int kMostLeftOut = 3;                                      // in a row: then the trial is given up
  static constexpr std::uint64_t kMostSteps = 2 * kMostRounds * kBlockSteps;  // of the rounds of a trial
  static constexpr std::uint64_t kRest = 16 * kMostSteps;  // steps, after which ranks compare them again at the latest
  static constexpr int kMostRefusals = 8;  // of the turn, while its holder begins no step: it has ended or waits

  // Returns the time in nanoseconds, when the device has done all work before this call.
  using Now = std::function<std::int64_t()>;
  // Returns the largest of each number, over all ranks.
  using Largest = std::function<std::vector<std::int64_t>(std::vector<std::int64_t>)>;

  // Ends a step. Several ends without a call between them end one step: optimizers may step in parts.
  void end_step() { ++num_ended_; }
  // Adds a call to the shape of the step. Called once for each, whichever way it goes.
  void count(int collective, std::int64_t num_bytes);
  // Begins a call that may be compressed. Called in the same order on all ranks. Returns true if it has decided.
  bool begin_call(const Now& now, const Largest& largest);

  // Returns whether calls are compressed now; nothing while no steps are known.
  std::optional<bool> compresses() const;
  // Returns the last decision: whether calls are compressed. Nothing before it, and during another trial. Never waits
  // for other ranks.
  std::optional<bool> decision() const;
  // Returns the rounds that it rests on, of one step each way, the same on all ranks; none without a decision.
  std::vector<Round> decided_rounds() const;
  // Tells whether compressed steps are faster by at least kLeastGainPercent, and by more than both spreads.
  static bool gains(const std::vector<Round>& rounds);

 private:
  void note_end_of_step();
  void look_for_steps(const Largest& largest);
  bool take_turn();
  void give_back_turn();
  void begin_trial();
  void begin_step();
  bool agree_on_round(const Now& now, const Largest& largest);
  std::optional<Round> take_time(std::int64_t now);
  void decide(std::optional<bool> decision, std::vector<Round> rounds);

  // Turn of this process.
  static inline std::atomic<const StepChoice*> in_trial_{nullptr};
  static inline std::atomic<std::uint64_t> num_beats_{0};  // turns taken, and steps that their holders have begun
  std::atomic<std::uint64_t> num_ended_{0};
  std::atomic<std::uint64_t> shape_{0};  // of the step so far: any order of the same calls has the same
  mutable std::mutex mutex_;             // guards all below; held while ranks agree
  std::uint64_t num_calls_ = 0;
  std::uint64_t compare_at_ = 4;  // the call from which on ranks compare steps
  std::uint64_t compare_gap_ = 4;
  std::uint64_t seen_beats_ = 0;
  int num_refused_ = 0;  // since then
  // Steps as this rank has ended them.
  std::uint64_t num_seen_ = 0;    // of the ends
  std::uint64_t last_begun_ = 0;  // the call at which the last one began
  std::uint64_t num_in_last_ = 0;
  std::uint64_t last_shape_ = 0;
  bool is_regular_ = false;  // the last two had as many calls
  bool is_alike_ = false;    // and the same shape
  // Steps of as many calls each, since the trial began.
  std::uint64_t calls_per_step_ = 0;
  std::uint64_t tried_shape_ = 0;
  std::uint64_t next_step_ = 0;                     // the call at which it begins
  std::int64_t step_ = 0;                           // 0: the part of one in which the trial began
  std::optional<std::vector<Round>> trial_rounds_;  // during a trial
  Round round_;                                     // so far
  std::int64_t counted_from_time_ = 0;
  int num_left_out_ = 0;
  mutable std::mutex decision_mutex_;  // guards the next ones, which are written under both
  std::optional<bool> decision_;
  std::vector<Round> decided_rounds_;
};

}  // namespace zcomm
