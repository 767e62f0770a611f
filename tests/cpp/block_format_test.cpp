#include "zcomm/block_format.hpp"

#include <doctest/doctest.h>

#include "zcomm/error.hpp"

namespace zcomm {

TEST_CASE("formats print and parse") {
  CHECK(BlockFormat::parse("exact") == BlockFormat{ElementKind::exact, 0});
  CHECK(BlockFormat::parse("bf16") == BlockFormat{ElementKind::bf16, 0});
  CHECK(BlockFormat::parse("int8:32") == BlockFormat{ElementKind::int8, 32});
  CHECK(BlockFormat::parse("int4:4096") == BlockFormat{ElementKind::int4, 4096});
  CHECK(BlockFormat::parse("fp8:64") == BlockFormat{ElementKind::fp8, 64});
  CHECK(BlockFormat::parse("int4:64:stochastic") == BlockFormat{ElementKind::int4, 64, true});
  CHECK(BlockFormat::parse("int4:64") != BlockFormat::parse("int4:64:stochastic"));
  for (const char* text : {"exact", "bf16", "int8:256", "int4:96", "fp8:4096", "eden2:32", "eden3:128", "eden4:512",
                           "int8:32:stochastic", "int4:128:stochastic"}) {
    CHECK(BlockFormat::parse(text).to_string() == text);
  }
  CHECK(BlockFormat::parse("int8:64").has_scales());
  CHECK_FALSE(BlockFormat::parse("bf16").has_scales());
}

TEST_CASE("anything else is refused by name") {
  for (const char* text : {"",
                           "int8",
                           "int8:",
                           "int8:0",
                           "int8:16",
                           "int8:33",
                           "int8:4128",
                           "int8:-32",
                           "int8:+32",
                           "int8:032",
                           "int8: 32",
                           "int8:32 ",
                           "int8:99999999999",
                           "int4:32x",
                           "INT8:32",
                           "fp4:32",
                           "int2:64",
                           "int6:64",
                           "bf16:32",
                           "bf16:stochastic",
                           "int8:stochastic",
                           "int8:32:hadamard",
                           "int8:32:stochastic:",
                           "int8:32:stochastic:stochastic",
                           ":stochastic",
                           "fp8:32:stochastic",
                           "eden2",
                           "eden1:32",
                           "eden2:96",
                           "eden2:1024",
                           "eden4:64:stochastic"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(BlockFormat::parse(text), ArgumentError);
  }
  CHECK_THROWS_WITH(
      BlockFormat::parse("int8:33"),
      "format: expected exact, bf16, int8:B, int4:B, fp8:B, eden2:B, eden3:B or eden4:B, got 'int8:33': B is a "
      "multiple of 32 from 32 to 4096, for eden a power of two up to 512; :stochastic may follow B of int8 and int4");
  CHECK_THROWS_WITH(BlockFormat::parse("int8:stochastic"),
                    "format: expected a block size, such as int8:256, got 'int8:stochastic'");
  CHECK_THROWS_WITH(
      BlockFormat::parse("fp8:32:stochastic"),
      "format: expected fp8 without :stochastic, got 'fp8:32:stochastic': it is always rounded to nearest");
  CHECK_THROWS_WITH(traits(static_cast<ElementKind>(8)),
                    "format: expected exact, bf16, int8, int4, fp8, eden2, eden3 or eden4, got the element kind 8");
}

TEST_CASE("fields that were set one by one are valid if they print as a format") {
  for (const char* text : {"exact", "bf16", "int8:32", "int4:4096", "int4:64:stochastic", "fp8:128", "eden2:512"}) {
    CHECK(BlockFormat::parse(text).is_valid());
  }
  const auto valid = [](ElementKind kind, int block_size, bool stochastic = false) {
    return BlockFormat{kind, block_size, stochastic}.is_valid();
  };
  CHECK_FALSE(valid(ElementKind::exact, 32));
  CHECK_FALSE(valid(ElementKind::exact, 0, true));
  CHECK_FALSE(valid(ElementKind::bf16, 0, true));
  CHECK_FALSE(valid(ElementKind::int8, 0));
  CHECK_FALSE(valid(ElementKind::int8, 48));
  CHECK_FALSE(valid(ElementKind::int4, -32));
  CHECK_FALSE(valid(ElementKind::int4, 8192));
  CHECK_FALSE(valid(ElementKind::fp8, 128, true));
  CHECK_FALSE(valid(ElementKind::eden2, 96));
  CHECK_FALSE(valid(ElementKind::eden3, 1024));
  CHECK_FALSE(valid(ElementKind::eden4, 64, true));
  CHECK_FALSE(valid(static_cast<ElementKind>(99), 32));
}

TEST_CASE("EDEN rotates blocks") {
  CHECK(BlockFormat::parse("int4:128").rotation() == 0);
  CHECK(BlockFormat::parse("eden2:128").rotation() == 128);
}

TEST_CASE("hop formats print and parse") {
  const HopFormats formats = HopFormats::parse("int8:128/int4:64");
  CHECK(formats.intra_node == BlockFormat{ElementKind::int8, 128});
  CHECK(formats.inter_node == BlockFormat{ElementKind::int4, 64});
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
