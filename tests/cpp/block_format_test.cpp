#include "zcomm/block_format.hpp"

#include <doctest/doctest.h>

#include "zcomm/error.hpp"

namespace zcomm {

TEST_CASE("formats print and parse") {
  CHECK(BlockFormat::parse("exact") == BlockFormat{ElementKind::exact, 0});
  CHECK(BlockFormat::parse("bf16") == BlockFormat{ElementKind::bf16, 0});
  CHECK(BlockFormat::parse("int8:32") == BlockFormat{ElementKind::int8, 32});
  CHECK(BlockFormat::parse("int4:4096") == BlockFormat{ElementKind::int4, 4096});
  CHECK(BlockFormat::parse("fp8:64:hadamard") == BlockFormat{ElementKind::fp8, 64, true, false});
  CHECK(BlockFormat::parse("int6:64:stochastic") == BlockFormat{ElementKind::int6, 64, false, true});
  CHECK(BlockFormat::parse("int2:64") != BlockFormat::parse("int2:64:hadamard"));
  for (const char* text : {"exact", "bf16", "int8:256", "int6:32", "int4:96", "int2:4096", "fp8:128", "fp8:32:hadamard",
                           "int8:32:stochastic", "int4:128:hadamard:stochastic"}) {
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
                           "exact:hadamard",
                           "bf16:32",
                           "bf16:stochastic",
                           "int8:hadamard",
                           "int8:32:hadamard:",
                           "int8:32:stochastic:hadamard",
                           "int8:32:hadamard:hadamard",
                           ":hadamard",
                           "fp8:32:stochastic"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(BlockFormat::parse(text), ArgumentError);
  }
  CHECK_THROWS_WITH(BlockFormat::parse("int8:33"),
                    "format: expected exact, bf16, int8:B, int6:B, int4:B, int2:B or fp8:B, got 'int8:33': B is a "
                    "multiple of 32 from 32 to 4096; :hadamard and then :stochastic may follow B");
  CHECK_THROWS_WITH(BlockFormat::parse("int8:hadamard"),
                    "format: expected a block size, such as int8:256, got 'int8:hadamard'");
  CHECK_THROWS_WITH(
      BlockFormat::parse("fp8:32:hadamard:stochastic"),
      "format: expected fp8 without :stochastic, got 'fp8:32:hadamard:stochastic': it is always rounded to "
      "nearest");
  CHECK_THROWS_WITH(traits(static_cast<ElementKind>(7)),
                    "format: expected exact, bf16, int8, int6, int4, int2 or fp8, got the element kind 7");
}

TEST_CASE("fields that were set one by one are valid if they print as a format") {
  for (const char* text : {"exact", "bf16", "int8:32", "int6:96", "int4:4096:hadamard", "int2:64:stochastic",
                           "int4:64:hadamard:stochastic", "fp8:128:hadamard"}) {
    CHECK(BlockFormat::parse(text).is_valid());
  }
  const auto valid = [](ElementKind kind, int block_size, bool hadamard = false, bool stochastic = false) {
    return BlockFormat{kind, block_size, hadamard, stochastic}.is_valid();
  };
  CHECK_FALSE(valid(ElementKind::exact, 32));
  CHECK_FALSE(valid(ElementKind::exact, 0, true));
  CHECK_FALSE(valid(ElementKind::bf16, 0, false, true));
  CHECK_FALSE(valid(ElementKind::int8, 0));
  CHECK_FALSE(valid(ElementKind::int8, 48));
  CHECK_FALSE(valid(ElementKind::int4, -32));
  CHECK_FALSE(valid(ElementKind::int4, 8192));
  CHECK_FALSE(valid(ElementKind::fp8, 128, false, true));
  CHECK_FALSE(valid(static_cast<ElementKind>(99), 32));
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
