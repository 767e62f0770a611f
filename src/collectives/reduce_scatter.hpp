// Stages of reductions.
#pragma once

#include <memory>

#include "stages.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// Makes the variant of a reduce_scatter that the plan is for. The plan and what the arguments refer to must outlive the
// stages; there is at least one chunk. `read_late` of the output: as in DecodeSum.
std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const ReducePlan& plan,
                                              const Arguments& arguments, bool read_late);

}  // namespace zcomm
