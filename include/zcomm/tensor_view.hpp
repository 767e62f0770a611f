// Views of contiguous, one-dimensional values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zcomm/dtype.hpp"

namespace zcomm {

// Borrows `num_elements` values. `data` is aligned to an element.
template <class Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  std::int64_t num_elements = 0;
  DType dtype = DType::float32;

  std::size_t num_bytes() const { return static_cast<std::size_t>(num_elements) * element_size(dtype); }

  // Returns elements [begin, begin + count), cut off at the end of the view: a range past the end is empty.
  BasicTensorView slice(std::int64_t begin, std::int64_t count) const {
    begin = begin < num_elements ? begin : num_elements;
    count = count < num_elements - begin ? count : num_elements - begin;
    return {data + static_cast<std::size_t>(begin) * element_size(dtype), count, dtype};
  }

  operator BasicTensorView<const Byte>() const { return {data, num_elements, dtype}; }
};

using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

// Splits a tensor into `size` shards of `shard_elements` each; the last ones are short or empty.
template <class Byte>
std::vector<BasicTensorView<Byte>> split(BasicTensorView<Byte> tensor, int size, std::int64_t shard_elements) {
  std::vector<BasicTensorView<Byte>> shards(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) shards[static_cast<std::size_t>(i)] = tensor.slice(i * shard_elements, shard_elements);
  return shards;
}

}  // namespace zcomm
