#include <numeric>

#include "pipeline.hpp"

namespace zcomm {

std::vector<TensorView> all_reduce_slots(TensorView tensor, int size, HopFormats formats) {
  const std::int64_t granule =
      std::lcm(std::max(formats.inside.block_size, 1), std::max(formats.between.block_size, 1));
  const std::int64_t even = (tensor.num_elements + size - 1) / size;
  return split(tensor, size, (even + granule - 1) / granule * granule);
}

void all_reduce(const Resources& r, TensorView tensor, HopFormats formats, float factor, const Feedback* feedback) {
  const std::vector<TensorView> slots = all_reduce_slots(tensor, r.transport.size(), formats);
  const TensorView own = slots[static_cast<std::size_t>(r.transport.rank())];
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const Segment<HopFormats> reduced{slots[0].num_elements, formats};
  const Segment<BlockFormat> gathered{slots[0].num_elements, formats.inside};
  reduce_scatter(r, inputs, own, {&reduced, 1}, factor, feedback);
  all_gather(r, own, slots, {&gathered, 1});
}

}  // namespace zcomm
