// Shares of a whole, in whole bytes.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace zcomm::c10d_binding {

// Returns `total` in parts that are as `shares`, and whose sum is `total`. The products fit: the shares are small
// counts.
inline std::vector<std::uint64_t> apportion(std::uint64_t total, const std::vector<std::uint64_t>& shares) {
  const std::uint64_t whole = std::accumulate(shares.begin(), shares.end(), std::uint64_t{0});
  std::vector<std::uint64_t> parts;
  std::uint64_t before = 0, given = 0;
  for (const std::uint64_t share : shares) {
    before += share;
    const std::uint64_t upto = whole == 0 ? 0 : total * before / whole;
    parts.push_back(upto - given);
    given = upto;
  }
  return parts;
}

}  // namespace zcomm::c10d_binding
