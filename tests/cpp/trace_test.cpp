#include "zcomm/trace.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "ranks.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using Kind = TraceStep::Kind;

constexpr std::int64_t kLength = 8192;

World world_of(const std::vector<int>& shape, std::int64_t num_chunks) {
  const std::int64_t elements = kLength / num_chunks;
  return {Topology(test::node_ids(shape)), 0, static_cast<std::size_t>(elements) * element_size(DType::bfloat16)};
}

SlotShape slots_of(const World& world) {
  return {std::vector<std::int64_t>(static_cast<std::size_t>(world.topology.size()), kLength), DType::bfloat16};
}

GatherPlan gather_of(const World& world) {
  const Segment<BlockFormat> whole{kLength, BlockFormat::parse("int8:128")};
  return {world, slots_of(world), {&whole, 1}};
}

ReducePlan reduce_of(const World& world) {
  const Segment<HopFormats> whole{kLength, HopFormats::parse("int8:128/int4:128")};
  return {world, slots_of(world), {&whole, 1}};
}

AllReducePlan all_reduce_of(const World& world) {
  return {world, kLength * world.topology.size(), DType::bfloat16, HopFormats::parse("int8:128/int4:128")};
}

std::int64_t groups(const Trace& trace) {
  return std::count_if(trace.begin(), trace.end(),
                       [](const TraceStep& step) { return step.kind == Kind::transfer && step.number > 0; });
}

LinkBytes sent(const Trace& trace) {
  LinkBytes total;
  for (const TraceStep& step : trace) total = total + step.sent;
  return total;
}

// Checks that a wait is for a transfer that was started before, and that none is left.
void check_waits(const Trace& trace) {
  std::size_t num_started = 0;
  std::set<std::size_t> open;
  for (const TraceStep& step : trace) {
    if (step.kind == Kind::transfer && step.number > 0) open.insert(num_started);
    if (step.kind == Kind::transfer) ++num_started;
    if (step.kind == Kind::wait) {
      CHECK(step.number < num_started);
      open.erase(step.number);
    }
  }
  CHECK(open.empty());
}

}  // namespace

TEST_CASE("trace: a grouped call takes a group per chunk, up to two more with two hops, an all_reduce six") {
  for (const std::int64_t num_chunks : {1, 2, 8}) {
    const World flat = world_of({8}, num_chunks);
    CHECK(groups(trace_of(gather_of(flat), true)) == num_chunks);
    CHECK(groups(trace_of(reduce_of(flat), true)) == num_chunks);
    const std::int64_t lanes = num_chunks > 1 ? 1 : 0;  // a step between a sum and what sends it on
    CHECK(groups(trace_of(all_reduce_of(flat), true)) == std::min(num_chunks + 2 + lanes, 2 * num_chunks));
    const World nodes = world_of({8, 8}, num_chunks);
    CHECK(groups(trace_of(gather_of(nodes), true)) == num_chunks + 1);
    const std::int64_t delay = num_chunks > 1 ? 2 : 1;  // of a reduction's second hop
    CHECK(groups(trace_of(reduce_of(nodes), true)) == num_chunks + delay);
    CHECK(groups(trace_of(all_reduce_of(nodes), true)) ==
          std::min(num_chunks + delay + 3 + lanes, 2 * num_chunks + delay + 1));
  }
}

TEST_CASE("trace: a group has a send and a receive for each peer and hop") {
  for (const int num_nodes : {2, 16, 64}) {
    const World world = world_of(std::vector<int>(static_cast<std::size_t>(num_nodes), 8), 4);
    const auto most = [](const Trace& trace) {
      return std::max_element(trace.begin(), trace.end(),
                              [](const TraceStep& a, const TraceStep& b) {
                                return (a.kind == Kind::transfer ? a.number : 0) <
                                       (b.kind == Kind::transfer ? b.number : 0);
                              })
          ->number;
    };
    const auto others = static_cast<std::size_t>(num_nodes - 1);
    // A gather sends its own slot, and those of other nodes, to each rank of the node.
    CHECK(most(trace_of(gather_of(world), true)) == 2 * (others + 2 * 7));
    CHECK(most(trace_of(reduce_of(world), true)) == 2 * (others + 7));
  }
}

TEST_CASE("trace: bytes are those of the plan, and every transfer is waited for") {
  for (const std::vector<int>& shape : {std::vector{1}, {4}, {1, 1, 1}, {2, 2}, {3, 1}, {2, 2, 2}}) {
    for (const std::int64_t num_chunks : {1, 4}) {
      for (const bool grouped : {true, false}) {
        CAPTURE(shape.size());
        CAPTURE(grouped);
        const World world = world_of(shape, num_chunks);
        const GatherPlan gather = gather_of(world);
        const ReducePlan reduce = reduce_of(world);
        const AllReducePlan all_reduce = all_reduce_of(world);
        CHECK(sent(trace_of(gather, grouped)) == gather.bytes());
        CHECK(sent(trace_of(gather, grouped, /*again=*/true)) == gather.bytes_from_secondary());
        CHECK(sent(trace_of(reduce, grouped)) == reduce.bytes());
        CHECK(sent(trace_of(all_reduce, grouped)) == all_reduce.bytes());
        for (const Trace& trace : {trace_of(gather, grouped), trace_of(gather, grouped, true),
                                   trace_of(reduce, grouped), trace_of(all_reduce, grouped)}) {
          check_waits(trace);
        }
      }
    }
  }
}

// By hand: 7 * 64 wires to the node at 112 a launch, 8 terms each for 63 nodes as repeats, 64 terms; then 512 slots
// at 76.
TEST_CASE("trace: launches of 64 nodes of 8 are those that the tables of a GPU's kernels give") {
  const auto launches = [](const Trace& trace) {
    std::vector<std::size_t> numbers;
    for (const TraceStep& step : trace) {
      if (step.kind == Kind::codec) numbers.push_back(step.number);
    }
    return numbers;
  };
  const World world = world_of(std::vector<int>(64, 8), 1);
  CHECK(launches(trace_of(reduce_of(world), true)) == std::vector<std::size_t>{4, 1, 1, 1});
  CHECK(launches(trace_of(gather_of(world), true)) == std::vector<std::size_t>{1, 7});
  const World domain = world_of({72}, 1);
  CHECK(launches(trace_of(reduce_of(domain), true)) == std::vector<std::size_t>{1, 1});
  CHECK(launches(trace_of(gather_of(domain), true)) == std::vector<std::size_t>{1, 1});
}

// By hand: of four shards one is encoded and four are decoded, each with its wire.
TEST_CASE("trace: the bytes of the codec are values and wires") {
  const World world = world_of({4}, 2);
  std::size_t num_bytes = 0;
  for (const TraceStep& step : trace_of(gather_of(world), true)) {
    if (step.kind == Kind::codec) num_bytes += step.num_bytes;
  }
  const std::size_t wire = wire_bytes(BlockFormat::parse("int8:128"), DType::bfloat16, kLength / 2);
  CHECK(num_bytes == 5 * (2 * wire + 2 * kLength));
}

}  // namespace zcomm
