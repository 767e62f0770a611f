#include "pipeline.hpp"

#include "counted.hpp"

namespace zcomm {
namespace {

using Stage = void (Stages::*)(std::int64_t chunk);

void run(Stages& stages, Stage stage, std::int64_t chunk) {
  if (chunk >= 0 && chunk < stages.num_chunks()) (stages.*stage)(chunk);
}

// Before the group of a step goes out, and after.
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

void run_pipeline(const Resources& r, Stages& stages) {
  for (std::int64_t step = 0; step < num_steps(stages); ++step) {
    r.transport.begin_group();
    start(stages, step);
    end_group(r);
    finish(stages, step);
  }
}

void run_pipeline(const Resources& r, Stages& first, Stages& second) {
  const std::int64_t delay = first.num_hops() + 1;  // steps that a chunk takes in the first one
  for (std::int64_t step = 0; step < num_steps(second) + delay; ++step) {
    r.transport.begin_group();
    start(first, step);
    start(second, step - delay);
    end_group(r);
    finish(first, step);
    finish(second, step - delay);
  }
}

}  // namespace zcomm
