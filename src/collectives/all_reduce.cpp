#include "all_gather.hpp"
#include "reduce_scatter.hpp"

namespace zcomm {

std::vector<TensorView> all_reduce_slots(TensorView tensor, int size, HopFormats formats) {
  const std::int64_t granule = granule_of(formats);
  const std::int64_t even = (tensor.num_elements + size - 1) / size;
  return split(tensor, size, (even + granule - 1) / granule * granule);
}

void all_reduce(const Resources& resources, const AllReducePlan& plan, TensorView tensor, float factor,
                const Feedback* feedback) {
  if (plan.gather().num_chunks() == 0) return;
  const std::vector<TensorView> slots =
      split(tensor, resources.transport.size(), plan.gather().slots().lengths.front());
  const TensorView own = slots[static_cast<std::size_t>(resources.transport.rank())];
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const Reduction reduction{plan.reduce(), inputs, own, factor, feedback};
  const std::unique_ptr<Stages> reduce = reduce_scatter_stages(resources, reduction);
  Resources gathering = resources;
  gathering.first_hop = 2;
  const std::unique_ptr<Stages> gather = all_gather_stages(gathering, plan.gather(), own, slots);
  // In place: when a chunk is gathered, all that the sums need of it has been read.
  run_pipeline(resources, *reduce, *gather);
}

}  // namespace zcomm
