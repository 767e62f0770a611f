#include "zcomm/block_format.hpp"

#include <doctest/doctest.h>

#include "zcomm/error.hpp"

namespace zcomm {

TEST_CASE("formats print and parse") {
  CHECK(BlockFormat::parse("exact") == BlockFormat{ElementKind::exact, 0});
  CHECK(BlockFormat::parse("bf16") == BlockFormat{ElementKind::bf16, 0});
  CHECK(BlockFormat::parse("int8:32") == BlockFormat{ElementKind::int8, 32});
  CHECK(BlockFormat::parse("int4:4096") == BlockFormat{ElementKind::int4, 4096});
  for (const char* text : {"exact", "bf16", "int8:256", "int4:96"}) CHECK(BlockFormat::parse(text).to_string() == text);
  CHECK(BlockFormat::parse("int8:64").has_scales());
  CHECK_FALSE(BlockFormat::parse("bf16").has_scales());
}

TEST_CASE("anything else is refused by name") {
  for (const char* text : {"", "int8", "int8:", "int8:0", "int8:16", "int8:33", "int8:4128", "int8:-32", "int8:+32",
                           "int8:032", "int8: 32", "int8:32 ", "int8:99999999999", "int4:32x", "INT8:32", "fp8:32"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(BlockFormat::parse(text), ArgumentError);
  }
  CHECK_THROWS_WITH(BlockFormat::parse("int8:33"),
                    "format: got 'int8:33', expected exact, bf16, int8:B or int4:B with B a multiple of 32 from 32 to "
                    "4096");
}

TEST_CASE("hop formats print and parse") {
  const HopFormats formats = HopFormats::parse("int8:128/int4:64");
  CHECK(formats.inside == BlockFormat{ElementKind::int8, 128});
  CHECK(formats.between == BlockFormat{ElementKind::int4, 64});
  CHECK(formats.to_string() == "int8:128/int4:64");
  CHECK(HopFormats::parse("bf16") == HopFormats::parse("bf16/bf16"));
  CHECK(HopFormats::parse("bf16/bf16").to_string() == "bf16");
  CHECK(HopFormats::parse("exact").is_exact());
  CHECK_FALSE(HopFormats::parse("exact/bf16").is_exact());
  for (const char* text : {"", "/", "int8:128/", "/int8:128", "exact/exact/exact"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(HopFormats::parse(text), ArgumentError);
  }
}

}  // namespace zcomm
