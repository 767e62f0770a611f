#include "zcomm/wire_layout.hpp"

#include <doctest/doctest.h>

#include <limits>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

void check(const char* format, DType dtype, std::int64_t num_elements, std::int64_t num_blocks,
           std::size_t codes_offset, std::size_t codes_bytes, std::size_t num_bytes) {
  CAPTURE(format);
  CAPTURE(num_elements);
  const WireLayout layout(BlockFormat::parse(format), dtype, num_elements);
  CHECK(layout.num_blocks == num_blocks);
  CHECK(layout.codes_offset == codes_offset);
  CHECK(layout.codes_bytes == codes_bytes);
  CHECK(layout.num_bytes == num_bytes);
}

}  // namespace

TEST_CASE("the parts of a wire") {
  check("exact", DType::float32, 5, 0, 0, 20, 32);
  check("exact", DType::float16, 8, 0, 0, 16, 16);
  check("bf16", DType::float32, 9, 0, 0, 18, 32);
  check("int8:32", DType::float32, 0, 0, 0, 0, 0);
  check("int8:32", DType::float32, 1, 1, 16, 1, 32);
  check("int8:128", DType::bfloat16, 1024, 8, 16, 1024, 1040);
  check("int8:128", DType::bfloat16, 1025, 9, 32, 1025, 1072);
  check("int4:32", DType::float32, 33, 2, 16, 17, 48);
  check("eden3:32", DType::float32, 42, 2, 16, 16, 32);
  check("eden3:32", DType::float32, 43, 2, 16, 17, 48);
  check("eden2:32", DType::float32, 65, 3, 16, 17, 48);
  check("fp8:32", DType::float32, 33, 2, 16, 33, 64);
}

TEST_CASE("where an element has its scale and its code") {
  const WireLayout layout(BlockFormat::parse("eden3:64"), DType::float32, 1000);
  CHECK(layout.scales_bytes() == 32);
  CHECK(layout.scale_offset(0) == 0);
  CHECK(layout.scale_offset(63) == 0);
  CHECK(layout.scale_offset(64) == 2);
  CHECK(layout.code_offset(0) == layout.codes_offset);
  CHECK(layout.code_offset(64) == layout.codes_offset + 24);
  const WireLayout exact({}, DType::float16, 1000);
  CHECK(exact.scale_offset(500) == 0);
  CHECK(exact.code_offset(504) == 1008);
  CHECK(wire_bytes({}, DType::float16, 1000) == exact.num_bytes);
}

TEST_CASE("sizes beyond 32 bits") {
  const std::int64_t n = (std::int64_t{1} << 40) + 1;
  check("int4:32", DType::float32, n, (std::int64_t{1} << 35) + 1, (std::size_t{1} << 36) + 16,
        (std::size_t{1} << 39) + 1, (std::size_t{1} << 36) + (std::size_t{1} << 39) + 32);
}

TEST_CASE("a number of elements that is negative, or whose bytes are not a number, is refused") {
  CHECK_THROWS_WITH_AS(WireLayout(BlockFormat::parse("bf16"), DType::float32, -1),
                       "num_elements: expected 0 or more, got -1", ArgumentError);
  check("exact", DType::float32, kMaxElements, 0, 0, std::size_t{1} << 60, std::size_t{1} << 60);
  CHECK_THROWS_WITH_AS(WireLayout({}, DType::float32, kMaxElements + 1),
                       "num_elements: expected at most 288230376151711744, got 288230376151711745", ArgumentError);
}

}  // namespace zcomm
