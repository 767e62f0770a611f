// Tests of what overlaps in a call, by clocks of the codec and of the link that a trace advances. Nothing is measured.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "ranks.hpp"
#include "zcomm/trace.hpp"

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
// sent. Work waits for what it is queued behind: on a GPU by streams, on a host by a thread.
Clocks simulate(const Trace& trace, double time_per_byte) {
  Clocks clocks;
  std::vector<double> ends;
  for (const TraceStep& step : trace) {
    if (step.kind == Kind::codec) {
      clocks.codec_time += static_cast<double>(step.num_bytes);
      clocks.processor += static_cast<double>(step.num_bytes);
    } else if (step.kind == Kind::transfer) {
      const double moving = time_per_byte * static_cast<double>(step.sent.intra_node + step.sent.inter_node);
      clocks.link_time += moving;
      clocks.link = std::max(clocks.link, clocks.processor) + moving;
      ends.push_back(clocks.link);
    } else {
      clocks.processor = std::max(clocks.processor, ends[step.number]);
    }
  }
  return clocks;
}

// Returns the share of a call during which the link is busy, if it is as fast as the codec.
double link_busy(const Trace& trace) {
  const double time_per_byte = simulate(trace, 0).codec_time / simulate(trace, 1).link_time;
  const Clocks clocks = simulate(trace, time_per_byte);
  return clocks.link_time / std::max(clocks.processor, clocks.link);
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

}  // namespace zcomm
