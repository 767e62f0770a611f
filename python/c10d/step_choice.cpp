#include "step_choice.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace zcomm {
namespace {

std::int64_t sum_of(const Round& spreads) { return spreads.exact + spreads.compressed; }

StepDecision result_of(const Contest& contest) {
  const int steps_of_round = 2 * static_cast<int>(StepChoice::kBlockSteps - 1);
  return {contest.medians(), contest.spreads(), contest.num_counted() * steps_of_round};
}

// Tells whether more rounds would not change the decision, or are too many.
bool is_over(const Contest& contest) {
  if (contest.num_counted() < StepChoice::kFewestRounds) return false;
  const auto [medians, spreads, num_steps] = result_of(contest);
  const std::int64_t least_gain = medians.compressed * kLeastGainPercent / 100;
  return contest.num_counted() >= StepChoice::kMostRounds ||
         std::abs(medians.exact - medians.compressed - least_gain) > sum_of(spreads);
}

std::int64_t block_of(std::int64_t step) { return step / StepChoice::kBlockSteps; }

// Orders blocks as exact, compressed, compressed, exact, so that a drift of the times favours neither.
bool is_compressed(std::int64_t block) { return block % 4 == 1 || block % 4 == 2; }

}  // namespace

bool StepDecision::gains() const { return medians.gains() && medians.exact - medians.compressed > sum_of(spreads); }

void StepChoice::count(int collective, std::int64_t num_bytes) {
  std::uint64_t mixed = 4 * static_cast<std::uint64_t>(num_bytes) + static_cast<std::uint64_t>(collective) + 1;
  mixed *= 0x9e3779b97f4a7c15;
  shape_ += mixed ^ (mixed >> 29);
}

bool StepChoice::begin_call(const Means& means) {
  const std::lock_guard lock(mutex_);
  ++num_calls_;
  if (const std::uint64_t num_ended = num_ended_; num_ended != num_seen_) {
    num_seen_ = num_ended;
    begin_step();
    if (contest_ && step_ % kBlockSteps <= 1) return agree_on_round(means);
  }
  // Compares steps at calls, which all ranks count alike. At rare ones, as a program without steps goes on for ever.
  if (!contest_ && !decision_ && num_calls_ >= 4 && std::has_single_bit(num_calls_)) {
    const auto hash = static_cast<std::int64_t>(begun_at_ >> 1);
    const std::vector<std::int64_t> most = means.largest({step_, -step_, hash, -hash});
    if (step_ >= 2 && most[0] == -most[1] && most[2] == -most[3]) begin_trial();
  }
  return false;
}

void StepChoice::begin_step() {
  ++step_;
  begun_at_ = 0x100000001b3 * begun_at_ + num_calls_;
  const std::uint64_t shape = shape_.exchange(0);
  num_alike_ = shape == last_shape_ ? num_alike_ + 1 : 1;
  last_shape_ = shape;
  const bool is_tried = contest_ || decision_;
  if (is_tried && shape != tried_shape_ && num_alike_ >= kStepsOfNewShape) begin_trial();
}

void StepChoice::begin_trial() {
  tried_shape_ = last_shape_;
  contest_.emplace();
  decision_.reset();
  round_ = {};
  counted_from_ = 0;
}

bool StepChoice::agree_on_round(const Means& means) {
  const std::optional<Round> mine = take_time(means.now());
  if (!mine) return false;
  const std::vector<std::int64_t> slowest = means.largest({mine->exact, mine->compressed});
  contest_->add({slowest[0], slowest[1]});
  if (!is_over(*contest_)) return false;
  decision_ = result_of(*contest_);
  contest_.reset();
  return true;
}

// Takes the time at the start of the counted steps of a block, or after them. Returns a round that is complete.
std::optional<Round> StepChoice::take_time(std::int64_t now) {
  if (step_ % kBlockSteps == 1) {
    counted_from_ = step_;
    counted_from_time_ = now;
    return std::nullopt;
  }
  const std::int64_t block = block_of(step_) - 1;
  if (block / 2 != round_number_) round_ = {};
  round_number_ = block / 2;
  if (counted_from_ != block * kBlockSteps + 1) return std::nullopt;  // the trial began inside of the block
  const std::int64_t of_step = (now - counted_from_time_) / (kBlockSteps - 1);
  (is_compressed(block) ? round_.compressed : round_.exact) = std::max<std::int64_t>(1, of_step);
  const bool is_complete = round_.exact > 0 && round_.compressed > 0;
  return is_complete ? std::optional(round_) : std::nullopt;
}

std::optional<bool> StepChoice::compresses() const {
  const std::lock_guard lock(mutex_);
  if (contest_) return is_compressed(block_of(step_));
  if (decision_) return decision_->gains();
  return std::nullopt;
}

std::optional<StepDecision> StepChoice::decision() const {
  const std::lock_guard lock(mutex_);
  return decision_;
}

}  // namespace zcomm
