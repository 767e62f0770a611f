#include "c10d/job/shares.hpp"

#include <doctest/doctest.h>

#include <numeric>

namespace zcomm::c10d_binding {

TEST_CASE("shares: no byte is lost, however small the whole is") {
  using Parts = std::vector<std::uint64_t>;
  CHECK(apportion(100, {1, 3}) == Parts{25, 75});
  CHECK(apportion(100, {1, 1, 1}) == Parts{33, 33, 34});
  CHECK(apportion(2, {1, 1, 1, 1}) == Parts{0, 1, 0, 1});
  CHECK(apportion(0, {1, 2}) == Parts{0, 0});
  CHECK(apportion(7, {0, 0}) == Parts{0, 0});
  CHECK(apportion(7, {}).empty());
  const Parts parts = apportion(123'456'789, {17, 1, 0, 400, 3});
  CHECK(std::accumulate(parts.begin(), parts.end(), std::uint64_t{0}) == 123'456'789);
}

}  // namespace zcomm::c10d_binding
