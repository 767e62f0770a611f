#include "step_choice.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace zcomm {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

bool is_gain(std::int64_t before, std::int64_t after) { return 100 * before >= (100 + kLeastGainPercent) * after; }

std::int64_t median(std::vector<std::int64_t> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

std::int64_t spread(std::vector<std::int64_t> times) {
  const std::int64_t middle = median(times);
  for (std::int64_t& time : times) time = std::abs(time - middle);
  return std::llround(2.0 * static_cast<double>(median(times)) / std::sqrt(static_cast<double>(times.size())));
}

Round of_each_way(const std::vector<Round>& rounds, std::int64_t (*summary)(std::vector<std::int64_t>)) {
  const auto of = [&](std::int64_t Round::* way) {
    std::vector<std::int64_t> times;
    for (const Round& round : rounds) times.push_back(round.*way);
    return summary(std::move(times));
  };
  return {of(&Round::exact), of(&Round::compressed), of(&Round::one_hop)};
}

std::int64_t sum_of(const Round& spreads) { return spreads.exact + spreads.compressed; }

// Tells whether more rounds would not change the decision, or are too many.
bool is_over(const std::vector<Round>& rounds) {
  if (std::ssize(rounds) < StepChoice::kFewestRounds) return false;
  const Round medians = medians_of(rounds);
  const std::int64_t least_gain = medians.compressed * kLeastGainPercent / 100;
  return std::ssize(rounds) >= StepChoice::kMostRounds ||
         std::abs(medians.exact - medians.compressed - least_gain) > sum_of(spreads_of(rounds));
}

std::int64_t block_of(std::int64_t step) { return step / StepChoice::kBlockSteps; }

// Orders blocks as exact, compressed, compressed, exact, so that a drift of the times favours neither.
bool is_compressed(std::int64_t block) { return block % 4 == 1 || block % 4 == 2; }

}  // namespace

bool Round::gains() const { return is_gain(exact, is_one_hop() ? one_hop : compressed); }

bool Round::is_one_hop() const { return one_hop > 0 && is_gain(compressed, one_hop); }

Round medians_of(const std::vector<Round>& rounds) { return of_each_way(rounds, median); }

Round spreads_of(const std::vector<Round>& rounds) { return of_each_way(rounds, spread); }

bool suffice(const std::vector<Round>& rounds) {
  std::int64_t total = 0;
  for (const Round& round : rounds) total += round.exact + round.compressed + round.one_hop;
  return rounds.size() >= 50 || (rounds.size() >= 3 && 10 * total >= 3 * kSecond) || total >= 2 * kSecond;
}

bool StepChoice::gains(const std::vector<Round>& rounds) {
  const Round medians = medians_of(rounds);
  return medians.gains() && medians.exact - medians.compressed > sum_of(spreads_of(rounds));
}

void StepChoice::count(int collective, std::int64_t num_bytes) {
  std::uint64_t mixed = 4 * static_cast<std::uint64_t>(num_bytes) + static_cast<std::uint64_t>(collective) + 1;
  mixed *= 0x9e3779b97f4a7c15;
  shape_ += mixed ^ (mixed >> 29);
}

bool StepChoice::begin_call(const Now& now, const Largest& largest) {
  const std::lock_guard lock(mutex_);
  ++num_calls_;
  note_end_of_step();
  if (calls_per_step_ > 0 && num_calls_ == next_step_) {
    begin_step();
    if (trial_rounds_ && step_ % kBlockSteps <= 1) return agree_on_round(now, largest);
  }
  if (!trial_rounds_) look_for_steps(largest);
  return false;
}

void StepChoice::note_end_of_step() {
  if (const std::uint64_t num_ended = num_ended_; std::exchange(num_seen_, num_ended) == num_ended) return;
  const std::uint64_t shape = shape_.exchange(0);
  const std::uint64_t num_in_step = num_calls_ - std::exchange(last_begun_, num_calls_);
  is_regular_ = std::exchange(num_in_last_, num_in_step) == num_in_step;
  is_alike_ = std::exchange(last_shape_, shape) == shape && is_regular_;
}

// Ranks that lack only the turn compare again after two blocks. All that follows depends on what they have agreed on.
void StepChoice::look_for_steps(const Largest& largest) {
  if (num_calls_ < compare_at_) return;
  const bool is_other = num_in_last_ != calls_per_step_ || (is_alike_ && last_shape_ != tried_shape_);
  const bool is_new = is_regular_ && (is_other || !decision_);
  const bool has_turn = is_new && take_turn();
  const auto begun = static_cast<std::int64_t>(last_begun_);
  const auto length = static_cast<std::int64_t>(num_in_last_);
  const std::vector<std::int64_t> most = largest({begun, -begun, length, -length, is_new ? 0 : 1, has_turn ? 0 : 1});
  const bool is_agreed = most[0] == -most[1] && most[2] == -most[3] && most[4] == 0;
  if (is_agreed && most[5] == 0) {
    begin_trial();
    return;
  }
  give_back_turn();
  compare_at_ = num_calls_ + (is_agreed ? 2 * kBlockSteps * num_in_last_ : compare_gap_);
  if (is_agreed) return;
  compare_gap_ *= 2;
  if (calls_per_step_ > 0) compare_gap_ = std::min(compare_gap_, kRest * calls_per_step_);
}

bool StepChoice::take_turn() {
  const StepChoice* holder = nullptr;
  if (!in_trial_.compare_exchange_strong(holder, this)) {
    if (holder == this) return true;
    if (const std::uint64_t beats = num_beats_; std::exchange(seen_beats_, beats) != beats) num_refused_ = 0;
    if (++num_refused_ <= kMostRefusals || !in_trial_.compare_exchange_strong(holder, this)) return false;
  }
  ++num_beats_;
  return true;
}

void StepChoice::give_back_turn() {
  const StepChoice* mine = this;
  in_trial_.compare_exchange_strong(mine, nullptr);
}

void StepChoice::begin_trial() {
  calls_per_step_ = num_in_last_;
  tried_shape_ = last_shape_;
  next_step_ = last_begun_ + calls_per_step_;
  while (next_step_ <= num_calls_) next_step_ += calls_per_step_;
  step_ = 0;
  num_left_out_ = 0;
  trial_rounds_.emplace();
  decide(std::nullopt, {});
}

void StepChoice::begin_step() {
  ++step_;
  if (in_trial_ == this) ++num_beats_;
  next_step_ += calls_per_step_;
}

bool StepChoice::agree_on_round(const Now& now, const Largest& largest) {
  const std::optional<Round> mine = take_time(now());
  if (!mine) return false;
  const bool is_other = num_in_last_ != calls_per_step_ || num_calls_ - last_begun_ > calls_per_step_;
  const std::vector<std::int64_t> slowest = largest({mine->exact, mine->compressed, is_other ? 1 : 0});
  num_left_out_ = slowest[2] == 0 ? 0 : num_left_out_ + 1;
  if (num_left_out_ == 0) trial_rounds_->push_back({slowest[0], slowest[1]});
  const bool is_decided = num_left_out_ == 0 && is_over(*trial_rounds_);
  if (!is_decided && num_left_out_ < kMostLeftOut) return false;
  if (is_decided) decide(gains(*trial_rounds_), *trial_rounds_);
  trial_rounds_.reset();
  give_back_turn();
  compare_gap_ =
      std::min(std::max(2 * compare_gap_, is_decided ? kMostSteps * calls_per_step_ : 0), kRest * calls_per_step_);
  compare_at_ = num_calls_ + compare_gap_;
  return is_decided;
}

// Takes the time at the start of the counted steps of a block, or after them. Returns a round that is complete.
std::optional<Round> StepChoice::take_time(std::int64_t now) {
  if (step_ % kBlockSteps == 1) {
    counted_from_time_ = now;
    return std::nullopt;
  }
  const std::int64_t block = block_of(step_) - 1;
  if (block % 2 == 0) round_ = {};
  if (block < 2) return std::nullopt;  // the first round connects ranks and touches fresh memory
  const std::int64_t of_step = (now - counted_from_time_) / (kBlockSteps - 1);
  (is_compressed(block) ? round_.compressed : round_.exact) = std::max<std::int64_t>(1, of_step);
  const bool is_complete = round_.exact > 0 && round_.compressed > 0;
  return is_complete ? std::optional(round_) : std::nullopt;
}

std::optional<bool> StepChoice::compresses() const {
  const std::lock_guard lock(mutex_);
  if (trial_rounds_) return is_compressed(block_of(step_));
  return decision_;
}

std::optional<bool> StepChoice::decision() const {
  const std::lock_guard lock(decision_mutex_);
  return decision_;
}

std::vector<Round> StepChoice::decided_rounds() const {
  const std::lock_guard lock(decision_mutex_);
  return decided_rounds_;
}

void StepChoice::decide(std::optional<bool> decision, std::vector<Round> rounds) {
  const std::lock_guard lock(decision_mutex_);
  decision_ = decision;
  decided_rounds_ = std::move(rounds);
}

}  // namespace zcomm
