#include "contest.hpp"

#include <algorithm>

namespace zcomm {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

bool is_gain(std::int64_t before, std::int64_t after) { return 100 * before >= (100 + kLeastGainPercent) * after; }

std::int64_t median(const std::vector<Round>& rounds, std::int64_t Round::* way) {
  std::vector<std::int64_t> times;
  for (const Round& round : rounds) times.push_back(round.*way);
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

bool Round::gains() const { return is_gain(exact, is_one_hop() ? one_hop : compressed); }

bool Round::is_one_hop() const { return one_hop > 0 && is_gain(compressed, one_hop); }

void Contest::add(Round round) {
  if (!is_warm_) {
    is_warm_ = true;
    return;
  }
  counted_.push_back(round);
  total_ += round.exact + round.compressed + round.one_hop;
}

bool Contest::is_over() const {
  if (counted_.empty()) return false;
  return counted_.size() >= 50 || (counted_.size() >= 3 && 10 * total_ >= 3 * kSecond) || total_ >= 2 * kSecond;
}

Round Contest::medians() const {
  return {median(counted_, &Round::exact), median(counted_, &Round::compressed), median(counted_, &Round::one_hop)};
}

}  // namespace zcomm
