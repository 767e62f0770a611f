#include <numeric>

#include "pipeline.hpp"

namespace zcomm {

void all_reduce(const Resources& r, TensorView tensor, HopFormats formats, float factor) {
  const int size = r.transport.size();
  const int rank = r.transport.rank();
  // Shards of whole blocks, so that the last ones are short or empty and no padding is copied.
  const std::int64_t granule =
      std::lcm(std::max(formats.inside.block_size, 1), std::max(formats.between.block_size, 1));
  const std::int64_t even = (tensor.num_elements + size - 1) / size;
  const std::vector<TensorView> slots = split(tensor, size, (even + granule - 1) / granule * granule);
  const TensorView own = slots[static_cast<std::size_t>(rank)];

  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const Segment<HopFormats> reduced{slots[0].num_elements, formats};
  const Segment<BlockFormat> gathered{slots[0].num_elements, formats.inside};
  reduce_scatter(r, inputs, own, {&reduced, 1}, factor);
  all_gather(r, own, slots, {&gathered, 1});
}

}  // namespace zcomm
