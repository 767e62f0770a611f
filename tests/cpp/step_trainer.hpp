// A rank that takes steps, for tests of step_choice.hpp.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/policy/step_choice.hpp"

namespace zcomm::test {

inline constexpr std::int64_t kMillisecond = 1'000'000;
inline constexpr int kManySteps = StepChoice::kBlockSteps * 2 * (StepChoice::kMostRounds + 4);

using Numbers = std::vector<std::int64_t>;

// One rank, whose clock and peers are planted.
struct Trainer {
  std::function<std::int64_t(bool compressed, int step)> time_of_step;
  std::function<Numbers(Numbers)> largest = [](Numbers numbers) { return numbers; };
  std::vector<std::int64_t> sizes{1 << 20, 1 << 22};
  StepChoice choice;
  std::int64_t now = 0;
  int step = 0;
  int num_decided = 0;
  std::vector<bool> ways;  // of the steps that are over, since there is a trial

  void take_step() {
    for (const std::int64_t size : sizes) {
      num_decided += choice.begin_call([&] { return now; }, largest) ? 1 : 0;
      choice.count(0, size);
    }
    const std::optional<bool> compressed = choice.compresses();
    if (compressed) ways.push_back(*compressed);
    now += time_of_step(compressed.value_or(false), step++);
    choice.end_step();
  }
  void take_steps(int count) {
    for (int i = 0; i < count; ++i) take_step();
  }
};

inline Trainer trainer(std::int64_t exact, std::int64_t compressed) {
  return {[=](bool is_compressed, int) { return is_compressed ? compressed : exact; }};
}

// The decision of a trainer that takes many steps, and what it rests on.
struct Decided {
  bool gains;
  std::vector<Round> rounds;
  Round medians;
};

inline Decided decided(Trainer&& trainer) {
  trainer.take_steps(kManySteps);
  CHECK(trainer.num_decided == 1);
  REQUIRE(trainer.choice.decision());
  CHECK(trainer.choice.compresses() == trainer.choice.decision());
  const std::vector<Round> rounds = trainer.choice.decided_rounds();
  CHECK(trainer.choice.decision() == StepChoice::gains(rounds));
  return {StepChoice::gains(rounds), rounds, medians_of(rounds)};
}

}  // namespace zcomm::test
