#include "zcomm/workspace.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <set>

#include "ranks.hpp"

namespace zcomm {

TEST_CASE("released scratch is handed out again, live scratch never") {
  auto workspace = make_host_workspace();
  std::byte* first = nullptr;
  {
    const Scratch a(*workspace, 100'000, {});
    const Scratch b(*workspace, 100'000, {});
    CHECK(a.data() != b.data());
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 64 == 0);
    first = a.data();
  }
  const Scratch again(*workspace, 99'000, {});
  const Scratch other(*workspace, 100'000, {});
  CHECK(std::set<std::byte*>{again.data(), other.data()}.count(first) == 1);
}

TEST_CASE("a size of zero is a valid piece, but scratch takes none") {
  auto workspace = make_host_workspace();
  std::byte* const piece = workspace->acquire(0, {});
  CHECK(piece != nullptr);
  workspace->release(piece, {});
  CHECK(Scratch(*workspace, 0, {}).data() == nullptr);
}

TEST_CASE("many threads") {
  auto workspace = make_host_workspace();
  test::run_ranks(4, [&](int rank) {
    for (int i = 0; i < 1000; ++i) {
      const Scratch scratch(*workspace, static_cast<std::size_t>(1 + (i * 37) % 20'000), {});
      *scratch.data() = std::byte(rank);
      CHECK(*scratch.data() == std::byte(rank));
    }
  });
}

}  // namespace zcomm
