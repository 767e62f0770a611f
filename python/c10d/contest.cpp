#include "contest.hpp"

#include <algorithm>

namespace zcomm {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

std::int64_t median(const std::vector<Round>& rounds, std::int64_t Round::* way) {
  std::vector<std::int64_t> times;
  for (const Round& round : rounds) times.push_back(round.*way);
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

bool Round::gains() const { return 100 * exact >= (100 + kLeastGainPercent) * compressed; }

void Contest::add(Round round) {
  if (!is_warm_) {
    is_warm_ = true;
    return;
  }
  counted_.push_back(round);
  total_ += round.exact + round.compressed;
}

bool Contest::is_over() const {
  if (counted_.empty()) return false;
  return counted_.size() >= 50 || (counted_.size() >= 3 && 10 * total_ >= 3 * kSecond) || total_ >= 2 * kSecond;
}

Round Contest::medians() const { return {median(counted_, &Round::exact), median(counted_, &Round::compressed)}; }

}  // namespace zcomm
