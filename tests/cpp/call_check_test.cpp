#include "zcomm/call_check.hpp"

#include <doctest/doctest.h>

#include <string>

namespace zcomm {

TEST_CASE("call check: a difference names both ranks and calls, and no hash") {
  CHECK(describe_difference(2, "all_gather 3 segments of exact #123 times 1", 0, "prepare x #9") ==
        "ranks called different things: rank 2 \"all_gather 3 segments of exact times 1\", rank 0 \"prepare x\"");
  CHECK(describe_difference(1, "x #1", 0, "x #2") ==
        "ranks called different things: rank 1 \"x\", rank 0 the same with other segments");
  const std::string call(kMaxCallChars, 'x');
  const std::string text = describe_difference(0, signature_text(call + "1"), 1, signature_text(call + "2"));
  CHECK(text.find('#') == std::string::npos);
  CHECK(difference(0, call_text("a"), 1, call_text("a")).empty());
}

TEST_CASE("call check: of a failure that quotes others the first cause stays") {
  const std::string difference = describe_difference(2, "a", 1, "b");
  const std::string lost = "rank 2 gave up in a: lost rank 1 (closed)";
  CHECK(first_cause("rank 0 gave up in c: " + difference) == difference);
  CHECK(first_cause("rank 0 gave up in c: " + lost) == lost);
  CHECK(first_cause(lost) == lost);
  CHECK(first_cause("lost rank 1 (closed)") == "lost rank 1 (closed)");
}

}  // namespace zcomm
