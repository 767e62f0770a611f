// The stages of an all_gather.
#pragma once

#include <memory>
#include <span>

#include "pipeline.hpp"

namespace zcomm {

// As all_gather(), which runs them. What they refer to must outlive them; at least one chunk.
std::unique_ptr<Stages> all_gather_stages(const Resources& resources, const GatherPlan& plan, ConstTensorView shard,
                                          std::span<const TensorView> slots, GatherExtras extras = {});

}  // namespace zcomm
