// Views of contiguous, one-dimensional values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zcomm/dtype.hpp"

namespace zcomm {

// Borrows `num_elements` contiguous values of type `dtype`.
// The view does not own the memory, which is in host memory or on a GPU according to the codec.
template <class Byte>
struct BasicTensorView {
  Byte* data = nullptr;  // aligned to element_size(dtype); may be null if there are no elements
  std::int64_t num_elements = 0;
  DType dtype = DType::float32;

  // Returns the bytes of all values.
  std::size_t num_bytes() const { return static_cast<std::size_t>(num_elements) * element_size(dtype); }

  // Returns elements [begin, begin + count), cut off at the end of the view.
  // A range past the end is empty. Requires `begin` and `count` not to be negative.
  BasicTensorView slice(std::int64_t begin, std::int64_t count) const {
    begin = begin < num_elements ? begin : num_elements;
    count = count < num_elements - begin ? count : num_elements - begin;
    return {data + static_cast<std::size_t>(begin) * element_size(dtype), count, dtype};
  }

  // Converts a writable view to a read-only one.
  operator BasicTensorView<const Byte>() const { return {data, num_elements, dtype}; }
};

using TensorView = BasicTensorView<std::byte>;             // writable
using ConstTensorView = BasicTensorView<const std::byte>;  // read-only

// Splits a tensor into `size` shards of `shard_elements` elements each.
// The last shards are short or empty if the tensor is shorter. Elements beyond all shards are in none.
template <class Byte>
std::vector<BasicTensorView<Byte>> split(BasicTensorView<Byte> tensor, int size, std::int64_t shard_elements) {
  std::vector<BasicTensorView<Byte>> shards(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) shards[static_cast<std::size_t>(i)] = tensor.slice(i * shard_elements, shard_elements);
  return shards;
}

}  // namespace zcomm
