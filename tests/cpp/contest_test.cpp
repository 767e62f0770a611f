#include "c10d/contest.hpp"

#include <doctest/doctest.h>

namespace zcomm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

Contest of(std::initializer_list<Round> rounds) {
  Contest contest;
  for (const Round& round : rounds) contest.add(round);
  return contest;
}

int rounds_until_over(Round each) {
  Contest contest;
  int num_rounds = 0;
  while (!contest.is_over()) {
    contest.add(each);
    ++num_rounds;
  }
  return num_rounds;
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
  const Contest contest = of({{0, 0, 0}, {10, 7, 5}, {9, 8, 900}, {11, 6, 4}});
  CHECK(contest.medians().one_hop == 5);
  CHECK(contest.medians().is_one_hop());
}

TEST_CASE("contest: the first round does not count") {
  const Contest contest = of({{1, 900}, {500, 100}});
  CHECK(contest.num_counted() == 1);
  CHECK(contest.medians().exact == 500);
  CHECK(contest.medians().compressed == 100);
  CHECK(contest.medians().gains());
  CHECK_FALSE(of({{4'000 * kMillisecond, 0}}).is_over());
}

TEST_CASE("contest: medians are those of each way, whatever one slow round says") {
  const Contest contest = of({{0, 0}, {10, 7}, {9000, 8}, {11, 9000}, {12, 6}, {9, 7}});
  CHECK(contest.medians().exact == 11);
  CHECK(contest.medians().compressed == 7);
  CHECK(of({{0, 0}, {2, 5}, {4, 3}}).medians().exact == 4);
}

TEST_CASE("contest: it takes many short rounds or few long ones") {
  CHECK(rounds_until_over({0, 0}) == 51);
  CHECK(rounds_until_over({kMillisecond, kMillisecond}) == 51);
  CHECK(rounds_until_over({20 * kMillisecond, 20 * kMillisecond}) == 9);
  CHECK(rounds_until_over({400 * kMillisecond, 200 * kMillisecond}) == 4);
  CHECK(rounds_until_over({900 * kMillisecond, 600 * kMillisecond, 600 * kMillisecond}) == 2);
  CHECK(rounds_until_over({1500 * kMillisecond, 600 * kMillisecond}) == 2);
}

}  // namespace zcomm
