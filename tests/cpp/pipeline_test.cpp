// Tests of what overlaps in a call, by clocks of the codec and of the link that a trace advances. Nothing is measured.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "ranks.hpp"
#include "zcomm/trace.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using Kind = TraceStep::Kind;

struct Clocks {
  double processor = 0;   // end of the codec's work
  double link = 0;        // end of what was sent
  double codec_time = 0;  // without waits
  double link_time = 0;
};

// Returns the clocks after a call whose codec takes 1 per byte, and whose link takes `time_per_byte` of all that is
// sent. Work waits for what it is queued behind: on a GPU by streams, on a host by a thread. Bytes travel `round_trip`
// after the start of their transfer at the earliest: so long do its announcement and they take to arrive.
Clocks simulate(const Trace& trace, double time_per_byte, double round_trip = 0) {
  Clocks clocks;
  std::vector<double> ends;
  for (const TraceStep& step : trace) {
    if (step.kind == Kind::codec) {
      clocks.codec_time += static_cast<double>(step.num_bytes);
      clocks.processor += static_cast<double>(step.num_bytes);
    } else if (step.kind == Kind::transfer) {
      const double moving = time_per_byte * static_cast<double>(step.sent.intra_node + step.sent.inter_node);
      clocks.link_time += moving;
      clocks.link = std::max(clocks.link, clocks.processor + round_trip) + moving;
      ends.push_back(clocks.link);
    } else {
      clocks.processor = std::max(clocks.processor, ends[step.number]);
    }
  }
  return clocks;
}

// Returns the share of a call during which the link is busy, if the link takes `times` as long as the codec.
double link_busy(const Trace& trace, double times = 1) {
  const double time_per_byte = times * simulate(trace, 0).codec_time / simulate(trace, 1).link_time;
  const Clocks clocks = simulate(trace, time_per_byte);
  return clocks.link_time / std::max(clocks.processor, clocks.link);
}

// Returns the most bytes that a rank has sent and not waited for.
std::size_t most_in_flight(const Trace& trace) {
  std::vector<std::size_t> sent;
  std::size_t in_flight = 0;
  std::size_t most = 0;
  for (const TraceStep& step : trace) {
    if (step.kind == Kind::transfer) {
      sent.push_back(step.sent.intra_node + step.sent.inter_node);
      in_flight += sent.back();
      most = std::max(most, in_flight);
    } else if (step.kind == Kind::wait) {
      in_flight -= sent[step.number];
    }
  }
  return most;
}

constexpr std::int64_t kChunks = 32;
constexpr std::int64_t kLength = 1024 * kChunks;

}  // namespace

TEST_CASE("pipeline: codec and link overlap where they take equally long") {
  for (const std::vector<int>& shape : {std::vector{1, 1}, {1, 1, 1, 1}, {2, 2}, {8, 8}}) {
    const World world{Topology(test::node_ids(shape)), 0, 4 * kLength / kChunks};
    const SlotShape slots{std::vector<std::int64_t>(static_cast<std::size_t>(world.topology.size()), kLength)};
    const Segment<BlockFormat> gathered{kLength, BlockFormat::parse("int8:256")};
    const Segment<HopFormats> reduced{kLength, HopFormats::parse("int8:128/int4:128")};
    for (const bool grouped : {false, true}) {
      CAPTURE(world.topology.to_string());
      CAPTURE(grouped);
      CHECK(link_busy(trace_of(GatherPlan(world, slots, {&gathered, 1}), grouped)) >= 0.9);
      CHECK(link_busy(trace_of(ReducePlan(world, slots, {&reduced, 1}), grouped)) >= 0.9);
    }
  }
}

// A layer of a model of 70 billion parameters, on GPUs.
TEST_CASE("pipeline: the few chunks of GPUs keep a link busy that takes five times as long as the codec") {
  for (const std::vector<int>& shape : {std::vector{1, 1}, {8}, {2, 2}, {8, 8}, std::vector(16, 8)}) {
    const std::vector<int> ids = test::node_ids(shape);
    const auto length = static_cast<std::int64_t>(855'638'016 / ids.size());
    const World world{Topology(ids), 0, kDefaultGpuChunkBytes};
    const SlotShape slots{std::vector<std::int64_t>(ids.size(), length), DType::bfloat16};
    const Segment<BlockFormat> gathered{length, BlockFormat::parse("int8:256")};
    const Segment<HopFormats> reduced{length, HopFormats::parse("int8:128/int4:128")};
    const Trace gather = trace_of(GatherPlan(world, slots, {&gathered, 1}), true);
    const Trace reduction = trace_of(ReducePlan(world, slots, {&reduced, 1}), true);
    CAPTURE(world.topology.to_string());
    CHECK(link_busy(gather, 5) >= 0.9);
    CHECK(link_busy(reduction, 5) >= 0.9);
    CHECK(link_busy(gather, 2) >= 0.75);
    CHECK(link_busy(reduction, 2) >= 0.75);
  }
}

TEST_CASE("pipeline: a far link is busy while announcements and bytes travel, and what is in flight is bounded") {
  constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
  constexpr std::int64_t kChunkLength = kChunkBytes / sizeof(float);
  constexpr std::int64_t kFarLength = 64 * kChunkLength;
  const Segment<BlockFormat> gathered{kFarLength, BlockFormat::parse("int4:64")};
  const Segment<HopFormats> reduced{kFarLength, HopFormats::parse("int4:64")};
  const auto traces = [&](const std::vector<int>& shape, bool grouped) {
    const World world{Topology(test::node_ids(shape)), 0, kChunkBytes};
    const SlotShape slots{std::vector<std::int64_t>(static_cast<std::size_t>(world.topology.size()), kFarLength)};
    return std::vector{trace_of(GatherPlan(world, slots, {&gathered, 1}), grouped),
                       trace_of(ReducePlan(world, slots, {&reduced, 1}), grouped)};
  };
  const std::size_t chunk_bytes = wire_bytes(gathered.format, DType::float32, kChunkLength);
  for (const Trace& trace : traces({1, 1}, false)) {
    const double time_per_byte = 10 * simulate(trace, 0).codec_time / simulate(trace, 1).link_time;
    const double round_trip = 12 * time_per_byte * static_cast<double>(chunk_bytes);  // as 150 Mbit/s and 100 ms have
    const Clocks clocks = simulate(trace, time_per_byte, round_trip);
    CHECK(clocks.link_time / (clocks.link - round_trip) >= 0.95);
    CHECK(most_in_flight(trace) <= std::size_t{4} << 20);
  }
  // 33 sites have two chunks in flight, as have nodes of their own and groups of transfers.
  for (const Trace& trace : traces(std::vector<int>(33, 1), false))
    CHECK(most_in_flight(trace) == 2 * 32 * chunk_bytes);
  for (const Trace& trace : traces({2}, false)) CHECK(most_in_flight(trace) == 2 * chunk_bytes);
  for (const Trace& trace : traces({1, 1}, true)) CHECK(most_in_flight(trace) == 2 * chunk_bytes);
}

}  // namespace zcomm
