#include "reduce_scatter.hpp"

namespace zcomm {

std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const Reduction& reduction) {
  if (reduction.plan.is_direct()) return direct_reduce_scatter(resources, reduction);
  if (reduction.plan.topology().is_hierarchical()) return hierarchical_reduce_scatter(resources, reduction);
  return flat_reduce_scatter(resources, reduction);
}

void reduce_scatter(const Resources& resources, const Reduction& reduction) {
  if (reduction.plan.num_chunks() == 0) return;
  run_pipeline(resources, *reduce_scatter_stages(resources, reduction));
}

}  // namespace zcomm
