#include "contest.hpp"

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

}  // namespace zcomm
