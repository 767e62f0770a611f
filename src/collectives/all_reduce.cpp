#include "zcomm/collectives.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

std::vector<TensorView> all_reduce_slots(TensorView tensor, int size, HopFormats formats) {
  const std::int64_t granule = granule_of(formats);
  const std::int64_t even = (tensor.num_elements + size - 1) / size;
  return split(tensor, size, (even + granule - 1) / granule * granule);
}

void all_reduce(const Resources& resources, const AllReducePlan& plan, TensorView tensor, float factor,
                const Feedback* feedback) {
  const std::vector<TensorView> slots =
      split(tensor, resources.transport.size(), plan.gather().slots().lengths.front());
  const TensorView own = slots[static_cast<std::size_t>(resources.transport.rank())];
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  reduce_scatter(resources, {plan.reduce(), inputs, own, factor, feedback});
  all_gather(resources, plan.gather(), own, slots);
}

}  // namespace zcomm
