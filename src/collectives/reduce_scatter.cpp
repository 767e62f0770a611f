#include "reduce_scatter.hpp"

namespace zcomm {

void reduce_scatter(const Resources& resources, const ReducePlan& plan, std::span<const ConstTensorView> slots,
                    TensorView output, float factor, const Feedback* feedback) {
  if (plan.num_chunks() == 0) return;
  const Reduction reduction{plan, slots, output, factor, feedback};
  if (plan.is_direct()) {
    reduce_scatter_direct(resources, reduction);
  } else if (plan.topology().is_hierarchical()) {
    reduce_scatter_hierarchical(resources, reduction);
  } else {
    reduce_scatter_flat(resources, reduction);
  }
}

}  // namespace zcomm
