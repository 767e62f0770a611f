#include "pipeline.hpp"

#include "counted.hpp"

namespace zcomm {
namespace {

using Stage = void (Stages::*)(std::int64_t chunk);

void run(Stages& stages, Stage stage, std::int64_t chunk) {
  if (chunk >= 0 && chunk < stages.num_chunks()) (stages.*stage)(chunk);
}

// Calls before and after the group of a step is launched.
void start(Stages& stages, std::int64_t step) {
  run(stages, &Stages::first_hop, step);
  if (stages.num_hops() == 2) run(stages, &Stages::second_hop, step - 1);
}

void finish(Stages& stages, std::int64_t step) {
  run(stages, &Stages::meanwhile, step + 1 - stages.num_hops());
  run(stages, &Stages::finish, step - stages.num_hops());
}

std::int64_t num_steps(const Stages& stages) { return stages.num_chunks() + stages.num_hops(); }

}  // namespace

void run_pipeline(const Resources& r, const Pipeline& pipeline) {
  if (pipeline.first == nullptr) return;
  Stages& first = *pipeline.first;
  Stages* const second = pipeline.second.get();
  const std::int64_t delay = second == nullptr ? 0 : first.num_hops() + 1;  // steps per chunk in the first one
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
