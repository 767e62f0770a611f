#include "zcomm/segment.hpp"

#include <doctest/doctest.h>

#include <cstring>

#include "calls.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

using namespace std::chrono_literals;
using namespace test;

TEST_CASE("segments: each gives the bits that it would give alone, whatever the chunks") {
  struct Part {
    std::int64_t num_elements;
    const char* gather;
    const char* reduce;
  };
  const std::vector<Part> parts{
      {0, "int8:64", "int8:64"},        {1000, "int8:64", "int8:64/int4:32"}, {7, "exact", "exact"},
      {33, "exact", "exact"},           {257, "int4:32", "int4:32"},          {64, "bf16", "int8:32/bf16"},
      {500, "int8:64", "exact/int4:64"}};
  std::vector<Segment<BlockFormat>> gathered;
  std::vector<Segment<HopFormats>> reduced;
  std::int64_t n = 0;
  for (const Part& part : parts) {
    gathered.push_back({part.num_elements, BlockFormat::parse(part.gather)});
    reduced.push_back({part.num_elements, HopFormats::parse(part.reduce)});
    n += part.num_elements;
  }
  for (const Shape& shape : kShapes) {
    const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
    const int size = static_cast<int>(ids.size());
    const auto inputs = random_tensors(size, n * size, 6);
    for (const std::size_t chunk_bytes : {std::size_t{400}, std::size_t{1} << 20}) {
      const auto communicators = test::make_communicators(ids, chunk_bytes);
      test::run_ranks(size, [&](int rank) {
        Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
        Values input = inputs[static_cast<std::size_t>(rank)];
        const auto slots = split(view(input), size, n);
        Values sum(static_cast<std::size_t>(n));
        test::reduce_scatter(communicator, const_split(input, size), view(sum), reduced, 0.5f, 20s);
        Values whole = input;
        const auto whole_slots = split(view(whole), size, n);
        test::all_gather(communicator, whole_slots[static_cast<std::size_t>(rank)], whole_slots, gathered, 20s);
        std::int64_t begin = 0;
        for (std::size_t i = 0; i < parts.size(); ++i) {
          const std::int64_t count = parts[i].num_elements;
          std::vector<ConstTensorView> inputs_alone;
          std::vector<TensorView> slots_alone;
          for (const TensorView& slot : slots) {
            slots_alone.push_back(slot.slice(begin, count));
            inputs_alone.push_back(slots_alone.back());
          }
          Values sum_alone(static_cast<std::size_t>(count));
          test::reduce_scatter(communicator, inputs_alone, view(sum_alone), reduced[i].format, 0.5f, 20s);
          if (count != 0 && std::memcmp(sum_alone.data(), sum.data() + begin, sum_alone.size() * 4) != 0)
            throw Error(std::string("reduce_scatter: other bits than alone in ") + parts[i].reduce);
          test::all_gather(communicator, slots_alone[static_cast<std::size_t>(rank)], slots_alone, gathered[i].format,
                           20s);
          begin += count;
        }
        if (!same_bits(whole, input)) throw Error("all_gather: other bits than alone");
      });
    }
  }
}

TEST_CASE("segments: elements that no segment has, or that no slot has, are refused") {
  const auto communicators = test::make_communicators({0});
  Values values(64);
  const TensorView slot = view(values);
  const ConstTensorView input = slot;
  const Segment<BlockFormat> gathered{63, BlockFormat::parse("int8:32")};
  const Segment<HopFormats> reduced[] = {{65, {}}, {-1, {}}};
  CHECK_THROWS_WITH_AS(test::all_gather(*communicators[0], input, {&slot, 1}, {&gathered, 1}, 1s),
                       doctest::Contains("segments: expected the 64 elements of the longest slot, got 63"),
                       ArgumentError);
  CHECK_THROWS_WITH_AS(test::reduce_scatter(*communicators[0], {&input, 1}, slot, reduced, 1.0f, 1s),
                       doctest::Contains("segments: expected 0 or more elements in each, got -1"), ArgumentError);
}

TEST_CASE("segments: ranks that disagree on them say so") {
  const auto communicators = test::make_communicators({0, 0});
  CHECK_THROWS_WITH_AS(test::run_ranks(2,
                                       [&](int rank) {
                                         Values values(128);
                                         const auto slots = split(view(values), 2, 64);
                                         const BlockFormat format = BlockFormat::parse("int8:32");
                                         const Segment<BlockFormat> segments[] = {{32 - rank, format}, {32 + rank, {}}};
                                         test::all_gather(*communicators[static_cast<std::size_t>(rank)],
                                                          slots[static_cast<std::size_t>(rank)], slots, segments, 20s);
                                       }),
                       doctest::Contains("2 segments #"), TransportError);
}

}  // namespace zcomm
