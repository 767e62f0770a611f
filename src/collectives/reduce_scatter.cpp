#include "reduce_scatter.hpp"

namespace zcomm {

void reduce_scatter(const Resources& resources, const Reduction& reduction) {
  if (reduction.plan.num_chunks() == 0) return;
  if (reduction.plan.is_direct()) return reduce_scatter_direct(resources, reduction);
  if (reduction.plan.topology().is_hierarchical()) return reduce_scatter_hierarchical(resources, reduction);
  reduce_scatter_flat(resources, reduction);
}

}  // namespace zcomm
