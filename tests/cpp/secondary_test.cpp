#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "calls.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/call.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

std::vector<TensorView> slots_of(Values& whole, int size) {
  return split(view(whole), size, static_cast<std::int64_t>(whole.size()) / size);
}

void fill(const TensorView& shard, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < shard.num_elements; ++i) {
    const float value = normal(generator);
    std::memcpy(shard.data + 4 * i, &value, 4);
  }
}

struct alignas(kWireAlignment) Unit {
  std::byte bytes[kWireAlignment];
};

TEST_CASE("secondary shards: the same bits again, and no byte between nodes, for every shape and size") {
  const std::vector<std::vector<int>> shapes{{1}, {4}, {1, 1, 1}, {2, 2}, {3, 1}, {1, 2, 3}, {2, 2, 2}};
  for (const std::vector<int>& shape : shapes) {
    for (const bool interleaved : {false, true}) {
      for (const std::int64_t shard_elements : {0, 1, 33, 1000, 4097}) {
        const std::vector<int> ids = test::node_ids(shape, interleaved);
        const int size = static_cast<int>(ids.size());
        const BlockFormat format = BlockFormat::parse("int8:64");
        const std::vector<Segment<BlockFormat>> segments{{shard_elements - shard_elements / 3, format},
                                                         {shard_elements / 3, {}}};
        const auto communicators = test::make_communicators(ids, 2048);  // several chunks
        std::vector<std::size_t> kept(ids.size());
        test::run_ranks(size, [&](int rank) {
          CAPTURE(size);
          CAPTURE(shard_elements);
          Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
          Values plain(static_cast<std::size_t>(size * shard_elements));
          const auto slots = slots_of(plain, size);
          fill(slots[static_cast<std::size_t>(rank)], static_cast<unsigned>(rank));
          Values whole = plain;
          const auto whole_slots = slots_of(whole, size);
          test::all_gather(communicator, slots[static_cast<std::size_t>(rank)], slots, segments, 20s);

          const GatherPlan plan(communicator.world(), shape_of(whole_slots), segments);
          kept[static_cast<std::size_t>(rank)] = plan.secondary_bytes();
          std::vector<Unit> secondary(kept[static_cast<std::size_t>(rank)] / kWireAlignment + 1);
          secondary.back().bytes[0] = std::byte{0x5a};  // not its own
          const auto data = std::make_shared<SecondaryShard>();
          data->memory = {secondary.data()->bytes, plan.secondary_bytes()};
          test::gather(communicator, plan, whole_slots[static_cast<std::size_t>(rank)], whole_slots, 20s, {}, data);
          if (!same_bits(whole, plain)) throw Error("another result with a secondary shard");
          for (int again = 0; again < 2; ++again) {
            Values fresh(whole.size(), -1.0f);
            const CallStats stats = test::gather_again(communicator, plan, slots_of(fresh, size), data, 20s);
            if (!same_bits(fresh, plain)) throw Error("another result from secondary shards");
            if (stats.inter_node_bytes != 0) throw Error("bytes between nodes");
          }
          if (secondary.back().bytes[0] != std::byte{0x5a}) throw Error("written past the end");
        });
        // Expects each node to keep all wires, each once.
        std::vector<std::size_t> of_node(shape.size());
        for (std::size_t rank = 0; rank < ids.size(); ++rank)
          of_node[static_cast<std::size_t>(ids[rank])] += kept[rank];
        for (const std::size_t bytes : of_node) CHECK(bytes == of_node[0]);
        if (shard_elements > 0) {
          CHECK(of_node[0] >=
                static_cast<std::size_t>(size) * WireLayout(format, DType::float32, shard_elements).num_bytes);
        }
      }
    }
  }
}

// Gathers once with an output and then into wires, and decodes these; `kept` may be null.
void check_wires(Communicator& communicator, const std::vector<std::int64_t>& lengths, bool keeps) {
  const auto longest = *std::ranges::max_element(lengths);
  const std::vector<Segment<BlockFormat>> segments{{longest - longest / 3, BlockFormat::parse("int8:64")},
                                                   {longest / 3, {}}};
  const auto rank = static_cast<std::size_t>(communicator.rank());
  Values whole(static_cast<std::size_t>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0})));
  const auto views_of = [&](Values& values) {
    std::vector<TensorView> slots;
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths)
      slots.push_back(view(values).slice(std::exchange(begin, begin + length), length));
    return slots;
  };
  const auto slots = views_of(whole);
  Values own(static_cast<std::size_t>(lengths[rank]));
  fill(view(own), static_cast<unsigned>(rank));
  const auto plan = std::make_shared<const GatherPlan>(communicator.world(), shape_of(slots), segments);
  const ConstTensorView shard = view(own);
  test::all_gather(communicator, shard, slots, segments, 20s);

  std::vector<Unit> secondary(plan->secondary_bytes() / kWireAlignment + 1);
  const auto kept = std::make_shared<SecondaryShard>();
  kept->memory = {secondary.data()->bytes, plan->secondary_bytes()};
  const GatherPtr operation = make_all_gather(plan, keeps ? kept : nullptr);
  const std::size_t num_bytes = operation->memory().wires;
  const auto codec = make_cpu_codec();
  std::vector<TensorView> lengths_alone = slots;
  for (TensorView& slot : lengths_alone) slot.data = nullptr;
  for (int again = 0; again < (keeps ? 2 : 1); ++again) {
    std::vector<Unit> wires(num_bytes / kWireAlignment + 1);
    wires.back().bytes[0] = std::byte{0x5a};  // not theirs
    Arguments arguments;
    if (again == 0) arguments.inputs = {&shard, 1};
    arguments.outputs = lengths_alone;
    arguments.wires = {wires.data()->bytes, num_bytes};
    communicator.run(*operation, arguments, 20s);
    Values fresh(whole.size(), -1.0f);
    const auto targets = views_of(fresh);
    operation->decode(*codec, {{}, targets, 1.0f, nullptr, arguments.wires}, {});
    if (!same_bits(fresh, whole)) throw Error("other values from wires");
    if (wires.back().bytes[0] != std::byte{0x5a}) throw Error("written past the end");
  }
}

TEST_CASE("gathers that leave wires: decoded, they are the values, once more, too") {
  for (const std::vector<int>& shape : std::vector<std::vector<int>>{{1}, {3}, {1, 1}, {2, 2}, {3, 1}, {1, 2, 3}}) {
    for (const std::int64_t longest : {1, 33, 4097}) {
      for (const bool keeps : {false, true}) {
        for (const bool is_even : {true, false}) {
          const std::vector<int> ids = test::node_ids(shape, false);
          std::vector<std::int64_t> lengths(ids.size(), longest);
          if (!is_even) lengths.back() = longest / 2;
          CAPTURE(lengths);
          const auto communicators = test::make_communicators(ids, 2048);  // several chunks
          test::run_ranks(static_cast<int>(ids.size()), [&](int rank) {
            check_wires(*communicators[static_cast<std::size_t>(rank)], lengths, keeps);
          });
        }
      }
    }
  }
}

TEST_CASE("gathers that leave wires: room of another size, and operations without wires, are refused") {
  const auto communicators = test::make_communicators({0});
  Communicator& communicator = *communicators[0];
  Values values(64);
  const TensorView slot = view(values);
  const ConstTensorView shard = slot;
  const Segment<BlockFormat> segment{64, BlockFormat::parse("int8:64")};
  const auto plan =
      std::make_shared<const GatherPlan>(communicator.world(), SlotShape{{64}}, GatherSegments(&segment, 1));
  const GatherPtr gather = make_all_gather(plan);
  std::vector<Unit> room(2);
  const Arguments given{{&shard, 1}, {&slot, 1}, 1.0f, nullptr, {room.data()->bytes, 1}};
  const auto codec = make_cpu_codec();
  CHECK_THROWS_WITH_AS(communicator.run(*gather, given, 20s), doctest::Contains("wires: expected "), ArgumentError);
  CHECK_THROWS_WITH_AS(gather->decode(*codec, given, {}), doctest::Contains("wires: expected "), ArgumentError);
  const auto lossless = make_lossless_gather(
      std::make_shared<const LosslessPlan>(communicator.world(), SlotShape{{64}, DType::bfloat16}));
  CHECK_THROWS_WITH_AS(lossless->decode(*codec, given, {}), doctest::Contains("expected a gather in a format"),
                       ArgumentError);
}

TEST_CASE("secondary shards: a gather from one that no gather has filled is refused") {
  const auto communicators = test::make_communicators({0});
  Values whole(64);
  const TensorView slot = view(whole);
  const Segment<BlockFormat> segment{64, BlockFormat::parse("int8:64")};
  const GatherPlan plan(communicators[0]->world(), SlotShape{{64}}, GatherSegments(&segment, 1));
  std::vector<Unit> memory(64);
  const auto secondary = std::make_shared<SecondaryShard>();
  secondary->memory = {memory.data()->bytes, plan.secondary_bytes()};
  CHECK_THROWS_WITH_AS(test::gather_again(*communicators[0], plan, {&slot, 1}, secondary, 20s),
                       doctest::Contains("secondary: expected a shard that a gather has filled"), ArgumentError);
  test::gather(*communicators[0], plan, slot, {&slot, 1}, 20s, {}, secondary);
  CHECK(secondary->generation == 1);
  test::gather_again(*communicators[0], plan, {&slot, 1}, secondary, 20s);
  CHECK(secondary->generation == 1);
}

TEST_CASE("secondary shards: ranks that disagree on a gather say so") {
  const auto communicators = test::make_communicators({0, 0});
  CHECK_THROWS_WITH_AS(test::run_ranks(2,
                                       [&](int rank) {
                                         Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
                                         Values whole(128);
                                         const auto slots = slots_of(whole, 2);
                                         const BlockFormat format = BlockFormat::parse("int8:64");
                                         const Segment<BlockFormat> segment{64, format};
                                         const GatherPlan plan(communicator.world(), shape_of(slots), {&segment, 1});
                                         std::vector<Unit> secondary(64);
                                         const auto data = std::make_shared<SecondaryShard>();
                                         data->memory = {secondary.data()->bytes, plan.secondary_bytes()};
                                         test::gather(communicator, plan, slots[static_cast<std::size_t>(rank)], slots,
                                                      20s, {}, data);
                                         if (rank == 0) {
                                           test::gather_again(communicator, plan, slots, data, 20s);
                                         } else {
                                           test::gather(communicator, plan, slots[1], slots, 20s, {}, data);
                                         }
                                       }),
                       doctest::Contains("gather_secondary"), TransportError);
}

}  // namespace
}  // namespace zcomm
