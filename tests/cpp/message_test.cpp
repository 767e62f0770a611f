#include <doctest/doctest.h>

#include "collectives/stages.hpp"

namespace zcomm {
namespace {

TEST_CASE("messages: a receiver finds the wires where the sender put them") {
  alignas(kWireAlignment) std::byte buffer[4096];
  const BlockFormat formats[] = {
      BlockFormat::parse("int4:32"), {}, BlockFormat::parse("int8:64"), BlockFormat::parse("bf16")};
  std::byte* written = buffer;
  const std::byte* read = buffer;
  std::size_t expected = 0;
  for (const BlockFormat& format : formats) {
    for (const std::int64_t count : {33, 0, 100}) {
      const std::byte* const place = take_wire(written, format, DType::float16, count);
      CHECK(place == buffer + expected);
      CHECK(take_wire(read, format, DType::float16, count) == place);
      expected += WireLayout(format, DType::float16, count).num_bytes;
    }
  }
  CHECK(written == buffer + expected);
}

}  // namespace
}  // namespace zcomm
