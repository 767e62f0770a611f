#include "pipeline.hpp"

#include "counted.hpp"

namespace zcomm {
namespace {

using Stage = void (Stages::*)(std::int64_t chunk);

void run(Stages& stages, Stage stage, std::int64_t chunk) {
  if (chunk >= 0 && chunk < stages.num_chunks()) (stages.*stage)(chunk);
}

// Returns the steps that the transfers of a chunk take.
int steps_per_chunk(const Stages& stages) { return stages.num_hops() == 1 ? 1 : stages.second_hop_delay() + 1; }

// Calls before and after the group of a step is launched.
void start(Stages& stages, std::int64_t step) {
  run(stages, &Stages::first_hop, step);
  if (stages.num_hops() == 2) run(stages, &Stages::second_hop, step - stages.second_hop_delay());
}

void finish(Stages& stages, std::int64_t step) {
  run(stages, &Stages::meanwhile, step + 1 - steps_per_chunk(stages));
  run(stages, &Stages::finish, step - steps_per_chunk(stages));
}

std::int64_t num_steps(const Stages& stages) { return stages.num_chunks() + steps_per_chunk(stages); }

}  // namespace

void run_pipeline(const Resources& r, const Pipeline& pipeline) {
  if (pipeline.first == nullptr) return;
  Stages& first = *pipeline.first;
  Stages* const second = pipeline.second.get();
  const std::int64_t delay = second == nullptr ? 0 : steps_per_chunk(first) + 1;
  const std::int64_t count = delay + num_steps(second == nullptr ? first : *second);
  for (std::int64_t step = 0; step < count; ++step) {
    r.transport.begin_group();
    start(first, step);
    if (second != nullptr) start(*second, step - delay);
    end_group(r);
    finish(first, step);
    if (second != nullptr) finish(*second, step - delay);
  }
  first.end();
}

}  // namespace zcomm
