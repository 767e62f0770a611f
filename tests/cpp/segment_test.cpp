#include <doctest/doctest.h>

#include <cstring>

#include "calls.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/chunks.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

using namespace std::chrono_literals;
using namespace test;

namespace {

struct alignas(kWireAlignment) Unit {
  std::byte bytes[kWireAlignment];
};

}  // namespace

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

TEST_CASE("segments: apart in memory they have the bits that they have side by side") {
  const std::vector<std::int64_t> lengths{100, 7, 0, 257};
  const std::int64_t n = 364;
  const std::vector<Segment<BlockFormat>> gathered{{100, BlockFormat::parse("int8:64")},
                                                   {7, {}},
                                                   {0, BlockFormat::parse("int8:64")},
                                                   {257, BlockFormat::parse("int4:32")}};
  const std::vector<Segment<HopFormats>> reduced{{100, HopFormats::parse("int8:64/int4:32")},
                                                 {7, {}},
                                                 {0, HopFormats::parse("int8:64")},
                                                 {257, HopFormats::parse("int8:32")}};
  for (const Shape& shape : kShapes) {
    const std::vector<int> ids = test::node_ids(shape.nodes, shape.interleaved);
    const int size = static_cast<int>(ids.size());
    const auto inputs = random_tensors(size, n * size, 9);
    for (const std::size_t chunk_bytes : {std::size_t{400}, std::size_t{1} << 20}) {
      const auto communicators = test::make_communicators(ids, chunk_bytes);
      test::run_ranks(size, [&](int rank) {
        Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
        Values whole = inputs[static_cast<std::size_t>(rank)];
        const auto slots = split(view(whole), size, n);
        std::vector<Values> apart;  // of each segment: the parts of all slots
        for (std::size_t segment = 0, begin = 0; segment < lengths.size(); ++segment) {
          Values& part = apart.emplace_back();
          const auto count = static_cast<std::size_t>(lengths[segment]);
          for (int slot = 0; slot < size; ++slot) {
            const auto first = whole.begin() + slot * n + static_cast<std::ptrdiff_t>(begin);
            part.insert(part.end(), first, first + static_cast<std::ptrdiff_t>(count));
          }
          begin += count;
        }
        std::vector<TensorView> parts;
        for (int slot = 0; slot < size; ++slot) {
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            parts.push_back(view(apart[i]).slice(slot * lengths[i], lengths[i]));
          }
        }
        const std::vector<ConstTensorView> const_parts(parts.begin(), parts.end());
        const ReducePlan reduce(communicator.world(), {std::vector<std::int64_t>(ids.size(), n)}, reduced);
        Values sum(static_cast<std::size_t>(n)), sum_of_parts(sum.size());
        test::reduce(communicator, reduce, std::vector<ConstTensorView>(slots.begin(), slots.end()), view(sum), 0.5f,
                     20s);
        test::reduce(communicator, reduce, const_parts, view(sum_of_parts), 0.5f, 20s);
        if (!same_bits(sum, sum_of_parts)) throw Error("reduce_scatter: other bits");

        const Values own(whole.begin() + rank * n, whole.begin() + (rank + 1) * n);
        const GatherPlan gather(communicator.world(), reduce.slots(), gathered);
        const auto kept = std::make_shared<SecondaryShard>();
        std::vector<Unit> memory(gather.secondary_bytes() / kWireAlignment);
        kept->memory = {memory.data()->bytes, gather.secondary_bytes()};
        test::gather(communicator, gather, view(own), slots, 20s);
        for (const bool again : {false, true}) {
          for (Values& part : apart) part.assign(part.size(), -1.0f);
          if (again) {
            test::gather_again(communicator, gather, parts, kept, 20s);
          } else {
            test::gather(communicator, gather, view(own), parts, 20s, {}, kept);
          }
          for (int slot = 0; slot < size; ++slot) {
            std::int64_t begin = 0;
            for (std::size_t i = 0; i < lengths.size(); begin += lengths[i++]) {
              const TensorView expected = slots[static_cast<std::size_t>(slot)].slice(begin, lengths[i]);
              const TensorView part = parts[static_cast<std::size_t>(slot) * lengths.size() + i];
              if (lengths[i] != 0 && std::memcmp(expected.data, part.data, part.num_bytes()) != 0)
                throw Error("all_gather: other bits");
            }
          }
        }
      });
    }
  }
}

TEST_CASE("segments: apart in memory they have the planned lengths") {
  const auto communicators = test::make_communicators({0});
  Values values(64);
  const Segment<HopFormats> reduced[] = {{60, HopFormats::parse("int8:32")}, {4, {}}};
  const ReducePlan plan(communicators[0]->world(), {{64}}, reduced);
  const ConstTensorView whole = view(values);
  const ConstTensorView parts[] = {whole.slice(0, 4), whole.slice(4, 60)};
  Values sum(64);
  CHECK_THROWS_WITH_AS(test::reduce(*communicators[0], plan, parts, view(sum), 1.0f, 1s),
                       doctest::Contains("slots: expected 60 elements of float32 in segment 0, got 4 of float32"),
                       ArgumentError);
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
                       doctest::Contains("the same with other segments"), TransportError);
}

}  // namespace zcomm
