// Stages of lossless gathers in host memory.
#pragma once

#include <memory>
#include <span>

#include "pipeline.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// Shard of a lossless gather, and the kept values that its difference refers to.
struct ShardDifference {
  const DifferencePlan& plan;
  ConstTensorView shard;
  Kept& kept;
};

// Makes the stages of make_lossless_gather(). The arguments must outlive them.
std::unique_ptr<Stages> difference_stages(const Resources& resources, const ShardDifference& shard,
                                          std::span<const TensorView> slots);
// Makes the stages of a gather from the kept values of the last one.
std::unique_ptr<Stages> kept_stages(const Resources& resources, const DifferencePlan& plan, const Kept& kept,
                                    std::span<const TensorView> slots);

}  // namespace zcomm
