#include <algorithm>

#include "stages.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using Stage = void (Stages::*)(std::int64_t chunk);

void run(Stages& stages, Stage stage, std::int64_t chunk) {
  if (chunk >= 0 && chunk < stages.num_chunks()) (stages.*stage)(chunk);
}

// Returns the steps from a chunk's first transfers to its last ones; to the end of these.
int steps_to_last(const Stages& stages) { return stages.num_hops() == 1 ? 0 : stages.second_hop_delay(); }
int steps_per_chunk(const Stages& stages) { return steps_to_last(stages) + stages.window(); }

// Calls before and after the group of a step is launched.
void start(Stages& stages, std::int64_t step) {
  run(stages, &Stages::first_hop, step);
  if (stages.num_hops() == 2) run(stages, &Stages::second_hop, step - stages.second_hop_delay());
}

void finish(Stages& stages, std::int64_t step) {
  run(stages, &Stages::meanwhile, step - steps_to_last(stages));
  run(stages, &Stages::finish, step - steps_per_chunk(stages));
}

std::int64_t num_steps(const Stages& stages) { return stages.num_chunks() + steps_per_chunk(stages); }

// Bounds of what is in flight in one hop: bytes of all ranks' wires, and chunks. 4 MiB each way between two sites are a
// round trip of 50 ms at 670 Mbit/s.
constexpr std::size_t kBytesInFlight = std::size_t{8} << 20;
constexpr std::int64_t kChunksInFlight = 64;

// Makes the call's stream wait for the lanes, at the latest where a call ends or fails: scratch is released there.
class LaneJoin {
 public:
  explicit LaneJoin(const Resources& r) : r_(r) {}
  ~LaneJoin() {
    try {
      join();
    } catch (const Error&) {
      // The device is lost.
    }
  }
  LaneJoin(const LaneJoin&) = delete;
  LaneJoin& operator=(const LaneJoin&) = delete;

  void join() const {
    if (r_.lanes != nullptr) r_.lanes->join(r_.stream);
  }

 private:
  const Resources& r_;
};

}  // namespace

int window_of(const Resources& r, std::size_t wire_bytes, std::int64_t num_chunks) {
  if (r.transport.is_stream_ordered() || r.world.topology.num_nodes() == 1) return 1;
  const auto wanted = static_cast<std::int64_t>(kBytesInFlight / std::max<std::size_t>(wire_bytes, 1));
  return static_cast<int>(std::max<std::int64_t>(std::min({wanted, kChunksInFlight, num_chunks}) - 1, 1));
}

void run_pipeline(const Resources& r, Stages& first) {
  Stages* const second = first.second.get();
  // Kernels of a step are in no order on lanes: what one has summed is sent on a step later.
  const std::int64_t delay = second == nullptr ? 0 : steps_per_chunk(first) + (r.lanes == nullptr ? 1 : 2);
  const std::int64_t count = delay + num_steps(second == nullptr ? first : *second);
  const LaneJoin lanes(r);
  for (std::int64_t step = 0; step < count; ++step) {
    r.transport.begin_group();
    start(first, step);
    if (second != nullptr) start(*second, step - delay);
    if (r.transport.is_stream_ordered()) {
      lanes.join();
      timed(r, r.stats.transfer_time, "zcomm::start_transfer", [&] { r.transport.end_group(r.stream); });
    }
    finish(first, step);
    if (second != nullptr) finish(*second, step - delay);
  }
  lanes.join();
  first.end();
}

}  // namespace zcomm
