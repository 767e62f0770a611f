#include "collectives/message.hpp"

#include <doctest/doctest.h>

namespace zcomm {
namespace {

TEST_CASE("messages: a reader finds the wires where the writer put them") {
  alignas(kWireAlignment) std::byte buffer[4096];
  const BlockFormat formats[] = {
      BlockFormat::parse("int4:32"), {}, BlockFormat::parse("int8:64"), BlockFormat::parse("bf16")};
  MessageWriter writer(buffer, DType::float16);
  MessageReader reader(buffer, DType::float16);
  std::size_t expected = 0;
  for (const BlockFormat& format : formats) {
    for (const std::int64_t count : {33, 0, 100}) {
      const std::byte* const place = writer.next(format, count);
      CHECK(place == buffer + expected);
      const Wire wire = reader.next(format, count);
      CHECK(wire.data == place);
      CHECK(wire.format == format);
      CHECK(wire.dtype == DType::float16);
      expected += WireLayout(format, DType::float16, count).num_bytes;
    }
  }
  const Send send = writer.send(3);
  CHECK(send.peer == 3);
  CHECK(send.data == buffer);
  CHECK(send.num_bytes == expected);
}

TEST_CASE("terms: the span of a sum stays as it is while terms are added") {
  TermList terms;
  for (int round = 0; round < 2; ++round) {  // the second one uses the memory of the first
    terms.clear();
    std::vector<std::span<const Wire>> sums;
    for (int number = 0; number < 40; ++number) {
      terms.begin_sum();
      for (int i = 0; i < number; ++i) {
        terms.add({nullptr, {}, DType::float32, static_cast<float>(number * 1000 + i)});
        if (i == number / 2) sums.push_back(terms.sum());  // of a part, as a residual's update and its job have it
      }
      sums.push_back(terms.sum());
      CHECK(terms.sum().size() == static_cast<std::size_t>(number));
    }
    for (const std::span<const Wire> sum : sums) {
      for (std::size_t i = 0; i < sum.size(); ++i) {
        CHECK(sum[i].factor == sum[0].factor + static_cast<float>(i));
      }
    }
    CHECK(sums.back().size() == 39);
    CHECK(sums.back()[0].factor == 39000.0f);
  }
}

}  // namespace
}  // namespace zcomm
