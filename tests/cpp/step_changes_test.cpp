// Steps that change, before, in and after a trial: c10d/policy/step_choice.hpp.
#include "step_trainer.hpp"

namespace zcomm {

using test::kManySteps;
using test::Trainer;
using test::trainer;

TEST_CASE("steps: another shape of steps is tried anew, one other step is not") {
  bool is_slow = true;
  Trainer one = trainer(0, 0);
  one.time_of_step = [&](bool compressed, int) { return compressed == is_slow ? 200 : 100; };
  one.take_steps(kManySteps);
  REQUIRE(one.choice.decision());
  CHECK_FALSE(one.choice.decision().value());
  is_slow = false;
  one.take_steps(kManySteps);
  one.sizes.push_back(7);  // an evaluation
  one.take_step();
  one.sizes.pop_back();
  std::swap(one.sizes[0], one.sizes[1]);  // the same calls
  one.take_steps(4 * kManySteps);
  CHECK(one.num_decided == 1);
  one.sizes[0] *= 2;
  one.take_step();
  CHECK(one.choice.decision());  // until the ranks compare steps
  one.take_steps(12 * kManySteps);
  CHECK(one.num_decided == 2);
  CHECK(one.choice.decision().value());
}

TEST_CASE("steps: a trial whose steps get other numbers of calls is given up, and made again") {
  Trainer one = trainer(200, 100);
  while (!one.choice.compresses()) one.take_step();
  one.take_steps(2 * StepChoice::kBlockSteps);
  one.time_of_step = [](bool compressed, int) { return compressed ? 3000 : 2000; };
  one.sizes.push_back(1 << 21);
  one.take_steps(kManySteps);
  CHECK(one.num_decided == 1);
  REQUIRE(one.choice.decision());
  CHECK(medians_of(one.choice.decided_rounds()).exact == 2000);
}

TEST_CASE("steps: those with other numbers of calls are tried anew") {
  Trainer one = trainer(200, 100);
  one.take_steps(kManySteps);
  one.time_of_step = [](bool compressed, int) { return compressed ? 3000 : 2000; };
  for (const std::int64_t size : {1, 2, 3}) one.sizes.push_back(size);
  one.take_steps(2 * kManySteps);
  CHECK(one.num_decided == 2);
  CHECK(medians_of(one.choice.decided_rounds()).exact == 2000);
}

TEST_CASE("steps: calls of an evaluation neither count nor begin another trial, in a trial or after it") {
  for (const int steps_before : {StepChoice::kBlockSteps + 6, std::int64_t{kManySteps}}) {
    for (const int num_calls : {1, 2, 99, 999}) {
      Trainer one = trainer(200, 100);
      while (!one.choice.compresses()) one.take_step();
      one.take_steps(static_cast<int>(steps_before));
      for (int i = 0; i < num_calls; ++i) {
        one.num_decided += one.choice.begin_call([&] { return one.now; }, one.largest) ? 1 : 0;
        one.choice.count(0, 1000);
        one.now += 7'000;
      }
      one.take_steps(kManySteps + num_calls);  // as ranks compare ever more rarely
      CHECK(one.num_decided == 1);
      REQUIRE(one.choice.decision());
      CHECK(medians_of(one.choice.decided_rounds()).exact == 200);
      CHECK(spreads_of(one.choice.decided_rounds()).exact == 0);
    }
  }
}

TEST_CASE("steps: an exact call in every second or third step begins no other trial") {
  for (const int every : {2, 3, 4}) {
    Trainer one = trainer(200, 100);
    for (int i = 0; i < 2 * kManySteps; ++i) {
      one.take_step();
      if (i % every == 0) one.choice.count(2, 4);
    }
    CHECK(one.num_decided == 1);
    REQUIRE(one.choice.decision());
    CHECK(medians_of(one.choice.decided_rounds()).exact == 200);
  }
}

TEST_CASE("steps: whose numbers of calls change in turn have no trial") {
  Trainer one = trainer(200, 100);
  for (int i = 0; i < kManySteps; ++i) {
    one.sizes.resize(i % 2 == 0 ? 2 : 3, 5);
    one.take_step();
  }
  CHECK_FALSE(one.choice.compresses());
}

TEST_CASE("steps: a trial begins in a long step, too") {
  Trainer one = trainer(200, 100);
  one.sizes.assign(8, 1);
  one.take_step();
  one.sizes.resize(2);
  one.take_steps(2);
  one.sizes.assign(10, 1);  // ranks compare at its fourth call, the 16th
  one.take_step();
  CHECK(one.choice.compresses());
  one.sizes.resize(2);
  one.take_steps(kManySteps);
  CHECK(one.num_decided == 1);
}

TEST_CASE("steps: of changing shapes, a trial is made and kept") {
  Trainer one = trainer(200, 100);
  for (int i = 0; i < 2 * kManySteps; ++i) {
    one.sizes[0] = 1000 + i;
    one.take_step();
  }
  CHECK(one.num_decided == 1);
}

TEST_CASE("steps: sizes that begin to vary do not stop a trial") {
  Trainer one = trainer(200, 100);
  one.take_steps(20);
  for (int i = 0; i < 2 * kManySteps; ++i) {
    one.sizes[0] = 1000 + i;
    one.take_step();
  }
  CHECK(one.num_decided == 1);
}

}  // namespace zcomm
