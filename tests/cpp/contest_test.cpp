#include <doctest/doctest.h>

#include "c10d/policy/step_choice.hpp"

namespace zcomm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

int rounds_until_over(Round each) {
  std::vector<Round> rounds{each};
  while (!suffice(rounds)) rounds.push_back(each);
  return static_cast<int>(rounds.size());
}

}  // namespace

TEST_CASE("contest: a gain of 3 % is the least that counts") {
  CHECK(Round{103, 100}.gains());
  CHECK(Round{1030, 1000}.gains());
  CHECK_FALSE(Round{1029, 1000}.gains());
  CHECK_FALSE(Round{100, 100}.gains());
  CHECK_FALSE(Round{50, 100}.gains());
  // Calls of an hour, where nothing may overflow.
  CHECK(Round{3'708'000 * kMillisecond, 3'600'000 * kMillisecond}.gains());
  CHECK_FALSE(Round{3'707'999 * kMillisecond, 3'600'000 * kMillisecond}.gains());
}

TEST_CASE("contest: one hop counts where it is another way, and where it gains over two") {
  CHECK_FALSE(Round{100, 100, 0}.is_one_hop());
  CHECK(Round{100, 103, 100}.is_one_hop());
  CHECK_FALSE(Round{1000, 1029, 1000}.is_one_hop());
  CHECK(Round{103, 200, 100}.gains());
  CHECK_FALSE(Round{102, 200, 100}.gains());
  CHECK(Round{103, 100, 99}.gains());
  const Round medians = medians_of({{10, 7, 5}, {9, 8, 900}, {11, 6, 4}});
  CHECK(medians.one_hop == 5);
  CHECK(medians.is_one_hop());
}

TEST_CASE("contest: medians are those of each way, whatever one slow round says") {
  const Round medians = medians_of({{10, 7}, {9000, 8}, {11, 9000}, {12, 6}, {9, 7}});
  CHECK(medians.exact == 11);
  CHECK(medians.compressed == 7);
  CHECK(medians_of({{2, 5}, {4, 3}}).exact == 4);
}

TEST_CASE("contest: it takes many short rounds or few long ones") {
  CHECK(rounds_until_over({0, 0}) == 50);
  CHECK(rounds_until_over({kMillisecond, kMillisecond}) == 50);
  CHECK(rounds_until_over({20 * kMillisecond, 20 * kMillisecond}) == 8);
  CHECK(rounds_until_over({400 * kMillisecond, 200 * kMillisecond}) == 3);
  CHECK(rounds_until_over({900 * kMillisecond, 600 * kMillisecond, 600 * kMillisecond}) == 1);
  CHECK(rounds_until_over({1500 * kMillisecond, 600 * kMillisecond}) == 1);
}

}  // namespace zcomm
