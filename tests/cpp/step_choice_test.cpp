#include "c10d/policy/step_choice.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <stdexcept>
#include <utility>

#include "step_trainer.hpp"

namespace zcomm {

using test::decided;
using test::Decided;
using test::kManySteps;
using test::kMillisecond;
using test::Numbers;
using test::Trainer;
using test::trainer;

TEST_CASE("steps: the faster way is taken from 3 % on") {
  CHECK(decided(trainer(103 * kMillisecond, 100 * kMillisecond)).gains);
  CHECK_FALSE(decided(trainer(102 * kMillisecond, 100 * kMillisecond)).gains);
  CHECK_FALSE(decided(trainer(100 * kMillisecond, 100 * kMillisecond)).gains);
  CHECK_FALSE(decided(trainer(50 * kMillisecond, 100 * kMillisecond)).gains);
  const Decided half = decided(trainer(200 * kMillisecond, 100 * kMillisecond));
  CHECK(half.medians.exact == 200 * kMillisecond);
  CHECK(half.medians.compressed == 100 * kMillisecond);
  CHECK(spreads_of(half.rounds).exact == 0);
  CHECK(half.rounds.size() == StepChoice::kFewestRounds);
}

TEST_CASE("steps: blocks go exact, compressed, compressed, exact") {
  Trainer one = trainer(200, 100);
  while (!one.choice.decision()) one.take_step();
  std::vector<int> blocks;  // lengths of runs of one way
  for (std::size_t i = 0; i < one.ways.size(); ++i) {
    if (i == 0 || one.ways[i] != one.ways[i - 1]) blocks.push_back(0);
    ++blocks.back();
  }
  REQUIRE(blocks.size() > 4);
  for (std::size_t i = 1; i + 2 < blocks.size(); ++i) CHECK(blocks[i] == 2 * StepChoice::kBlockSteps);
}

TEST_CASE("steps: the first step of a block does not count") {
  bool last = false;
  Trainer one = trainer(0, 0);
  one.time_of_step = [&](bool compressed, int) {
    const bool changed = compressed != std::exchange(last, compressed);
    return (compressed ? 100 : 200) + (changed ? 100'000 : 0);
  };
  const Decided found = decided(std::move(one));
  CHECK(found.medians.exact == 200);
  CHECK(found.medians.compressed == 100);
}

TEST_CASE("steps: a gain within the spread of the times is none, and takes the most rounds to tell") {
  const auto noisy = [](std::int64_t noise) {
    int round = 0;
    Trainer one = trainer(1, 1);
    one.largest = [&, noise](Numbers numbers) {
      if (numbers.size() != 3) return numbers;
      ++round;
      return Numbers{1100 + noise * (round * 7 % 11 - 5), 1000 + noise * (round * 5 % 11 - 5), 0};
    };
    return decided(std::move(one));
  };
  CHECK(noisy(3).gains);
  const Decided lost = noisy(60);
  CHECK(lost.medians.gains());
  CHECK_FALSE(lost.gains);
  CHECK(lost.rounds.size() == StepChoice::kMostRounds);
}

TEST_CASE("steps: one slow step decides nothing, nor do times that drift") {
  Trainer slow = trainer(110 * kMillisecond, 100 * kMillisecond);
  slow.time_of_step = [](bool compressed, int step) {
    return (compressed ? 100 : 110) * kMillisecond + (compressed && step == 34 ? 60'000 * kMillisecond : 0);
  };
  CHECK(decided(std::move(slow)).gains);
  Trainer drifting = trainer(0, 0);
  drifting.time_of_step = [](bool, int step) { return (1000 + 2 * step) * kMillisecond; };
  CHECK_FALSE(decided(std::move(drifting)).gains);
}

TEST_CASE("steps: what all ranks agree on decides, whatever this rank's clock says") {
  for (const std::int64_t mine : {1, 1'000'000}) {
    Trainer one = trainer(mine, 100 * mine);
    one.largest = [](Numbers numbers) { return numbers.size() == 3 ? Numbers{5000, 4000, 0} : numbers; };
    const Decided found = decided(std::move(one));
    CHECK(found.gains);
    CHECK(found.medians.exact == 5000);
  }
}

TEST_CASE("steps: groups have their trials one after another, and none has the gain of the other") {
  StepChoice gaining;
  StepChoice losing;
  std::int64_t now = 0;
  const auto compresses = [&](StepChoice& choice) {
    choice.begin_call([&] { return now; }, [](Numbers numbers) { return numbers; });
    choice.count(0, 1 << 20);
    return choice.compresses().value_or(false);
  };
  for (int i = 0; i < 4 * kManySteps; ++i) {
    const bool first = compresses(gaining);
    const bool second = compresses(losing);
    now += 200 - (first ? 100 : 0) + (second ? 20 : 0);
    gaining.end_step();
    losing.end_step();
  }
  REQUIRE(gaining.decision());
  REQUIRE(losing.decision());
  CHECK(gaining.decision().value());
  CHECK_FALSE(losing.decision().value());
}

TEST_CASE("steps: a group waits for its turn on each rank, and gives it back on those that had it") {
  Trainer one = trainer(200, 100);
  one.largest = [](Numbers numbers) {
    if (numbers.size() == 6) numbers[5] = 1;  // another rank is in the trial of another group
    return numbers;
  };
  one.take_steps(kManySteps);
  CHECK_FALSE(one.choice.compresses());
  Trainer other = trainer(200, 100);
  other.take_steps(kManySteps);
  CHECK(other.num_decided == 1);
  one.largest = [](Numbers numbers) { return numbers; };
  one.take_steps(kManySteps);
  CHECK(one.num_decided == 1);
}

TEST_CASE("steps: a group that fails, or makes no more calls, keeps others waiting for a while only") {
  Trainer idle = trainer(200, 100);
  while (!idle.choice.compresses()) idle.take_step();
  Trainer one = trainer(200, 100);
  one.take_steps(2 * kManySteps);
  CHECK(one.num_decided == 1);
  Trainer failed = trainer(200, 100);
  failed.largest = [](Numbers numbers) -> Numbers {
    if (numbers.back() == 0) throw std::runtime_error("a rank is lost");
    return numbers;
  };
  CHECK_THROWS_AS(failed.take_steps(kManySteps), std::runtime_error);
  Trainer next = trainer(200, 100);
  next.take_steps(2 * kManySteps);
  CHECK(next.num_decided == 1);
}

TEST_CASE("steps: each of several groups decides soon after the one before") {
  std::vector<StepChoice> groups(12);
  std::int64_t now = 0;
  int num_steps = 0;
  const auto decided = [&] {
    return std::ranges::all_of(groups, [](auto& group) { return group.decision().has_value(); });
  };
  for (; !decided() && num_steps < 12 * kManySteps; ++num_steps, ++now) {
    for (StepChoice& group : groups) {
      for (int call = 0; call < 3; ++call) {
        group.begin_call([&] { return now; }, [](Numbers numbers) { return numbers; });
        group.count(0, 1 << 20);
      }
    }
    for (StepChoice& group : groups) group.end_step();
  }
  CHECK(num_steps < 12 * static_cast<int>(StepChoice::kMostSteps + 4 * StepChoice::kBlockSteps));
}

TEST_CASE("steps: whose shapes come in runs, or depend on the way, decide; later trials get rare") {
  const int most = 2 * kManySteps;
  for (const int length : {1, 2, 3, 4, 5, 8, 16, 20, 40}) {
    for (const int num_shapes : {2, 3, 7}) {
      CAPTURE(length);
      CAPTURE(num_shapes);
      Trainer one = trainer(200, 100);
      for (int i = 0; i < most && !one.choice.decision(); ++i) {
        one.sizes[0] = 1000 * (1 + i / length % num_shapes);
        one.take_step();
      }
      REQUIRE(one.choice.decision());
      CHECK(one.choice.decision().value());
    }
  }
  Trainer other_calls = trainer(200, 100);
  for (int i = 0; i < most && !other_calls.choice.decision(); ++i) {
    other_calls.sizes.assign(other_calls.choice.compresses().value_or(false) ? 3 : 2, 1000);
    other_calls.take_step();
  }
  CHECK(other_calls.choice.decision());
  Trainer many = trainer(200, 100);
  for (int i = 0; i < 20'000; ++i) {
    many.sizes[0] = 1000 * (1 + i / 64 % 7);
    many.take_step();
  }
  CHECK(std::ranges::count(many.ways, false) < static_cast<std::ptrdiff_t>(many.ways.size() / 20));
}

TEST_CASE("steps: without steps, or with others on another rank, no trial begins") {
  Trainer none = trainer(200, 100);
  for (int i = 0; i < 1000; ++i) {
    CHECK_FALSE(none.choice.begin_call([] { return std::int64_t{0}; }, [](Numbers numbers) { return numbers; }));
    none.choice.count(0, 1);
  }
  CHECK_FALSE(none.choice.compresses());
  for (const std::size_t place : {0, 2}) {  // another rank's step began at another call, or had more calls
    Trainer one = trainer(200, 100);
    one.largest = [=](Numbers numbers) {
      ++numbers[place];
      return numbers;
    };
    one.take_steps(kManySteps);
    CHECK_FALSE(one.choice.compresses());
  }
}

TEST_CASE("steps: ranks compare rarely before a trial, once per round in it, and rarely after it") {
  int num_agreed = 0;
  Trainer one = trainer(200, 100);
  one.largest = [&](Numbers numbers) {
    ++num_agreed;
    return numbers;
  };
  while (!one.choice.compresses()) one.take_step();
  CHECK(num_agreed == 2);  // at calls 4 and 8
  CHECK(one.step == 4);
  one.take_steps(kManySteps);
  CHECK(num_agreed <= 2 + StepChoice::kFewestRounds + 1);
  one.take_steps(100 * static_cast<int>(StepChoice::kRest));
  CHECK(num_agreed <= 2 + StepChoice::kFewestRounds + 1 + 104);
}

TEST_CASE("steps: several ends without a call between them are one") {
  Trainer one = trainer(200, 100);
  for (int i = 0; i < kManySteps; ++i) {
    one.take_step();
    one.choice.end_step();
    one.choice.end_step();
  }
  REQUIRE(one.choice.decision());
  CHECK(medians_of(one.choice.decided_rounds()).exact == 200);
}

TEST_CASE("steps: ranks that end them elsewhere, once a trial has begun, agree and change the way at the same calls") {
  struct Act {
    bool compares;  // steps with other ranks
    bool compresses;
    bool operator==(const Act&) const = default;
  };
  // Ends steps as `ends_every_calls` has it up to call 400, then every two calls. From then on steps have another
  // shape.
  const auto acts_of = [](int ends_every_calls) {
    Trainer one = trainer(200, 100);
    while (!one.choice.compresses()) one.take_step();
    bool compares = false;
    const auto largest = [&](const Numbers& numbers) {
      compares = numbers.size() == 6;
      return compares ? Numbers{1, 1, 1, 1, 1, 1} : Numbers{200, 100, 0};  // decides, and begins no other trial
    };
    std::vector<Act> acts;
    for (int call = 1; call < 600; ++call) {
      compares = false;
      one.choice.begin_call([] { return std::int64_t{0}; }, largest);
      one.choice.count(0, one.sizes[static_cast<std::size_t>(call % 2)] << (call > 400 ? 1 : 0));
      acts.push_back({compares, one.choice.compresses().value()});
      const int every = call > 400 ? 2 : ends_every_calls;
      if (every > 0 && call % every == 0) one.choice.end_step();
    }
    CHECK(one.choice.decision());
    return acts;
  };
  const auto regular = acts_of(2);
  CHECK(std::ranges::any_of(regular, [](const Act& act) { return act.compares; }));
  for (const int ends_every_calls : {0, 1, 3, 7}) CHECK(acts_of(ends_every_calls) == regular);
}

// Python asks for the decision with a lock that other ranks may need to come.
TEST_CASE("steps: the decision can be asked for while the ranks agree") {
  Trainer one = trainer(200, 100);
  std::vector<std::future<bool>> asked;
  one.largest = [&](Numbers numbers) {
    asked.push_back(std::async(std::launch::async, [&] { return one.choice.decision().has_value(); }));
    CHECK(asked.back().wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    return numbers;
  };
  one.take_steps(kManySteps);
  CHECK(asked.size() > StepChoice::kFewestRounds);
  CHECK(one.num_decided == 1);
}

}  // namespace zcomm
