// Stages of lossless gathers.
#pragma once

#include <memory>
#include <span>

#include "difference_messages.hpp"
#include "pipeline.hpp"

namespace zcomm {

// Makes the stages of make_lossless_gather(). The other arguments must outlive them.
std::unique_ptr<Stages> difference_stages(const Resources& resources, const DifferencePlan& plan, Kept& kept,
                                          std::span<const TensorView> slots,
                                          std::unique_ptr<DifferenceMessages> messages);
// Makes the stages of a gather from the kept values of the last one.
std::unique_ptr<Stages> kept_stages(const Resources& resources, const DifferencePlan& plan, const Kept& kept,
                                    std::span<const TensorView> slots);

}  // namespace zcomm
