// What kernels make of a tile of values and of wires: the steps that every task of the codec takes. Wires are checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/cpu/kernels.hpp"
#include "zcomm/codec.hpp"

namespace zcomm::cpu {

inline std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

// Element i of a wire without scales.
const std::byte* value_at(const Wire& wire, std::int64_t i);

// values = elements [begin, begin + values.num_elements) of a wire of `num_elements`, saturated. Up to a tile.
// `stream`: see Kernels.
void decode_tile(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                 TensorView values, bool stream);

// terms = the sum of elements [begin, begin + count) of wires of `num_elements`. Up to a tile.
void sum_tile(const Kernels& kernels, std::span<const Wire> wires, std::int64_t num_elements, std::int64_t begin,
              std::int64_t count, float* terms);

// values = elements [begin, begin + values.num_elements) of the job's. Up to a tile. `stream`: see Kernels.
void decode_sum_tile(const Kernels& kernels, const DecodeSum& job, std::int64_t begin, TensorView values, bool stream);

// Encodes elements [begin, begin + values.num_elements) of a wire of `num_elements`, the first of a block on, and with
// the last of them the padding. `stream`: see Kernels.
void encode_range(const Kernels& kernels, ConstTensorView values, BlockFormat format, const Rounding& rounding,
                  std::int64_t num_elements, std::int64_t begin, std::byte* wire, bool stream);

}  // namespace zcomm::cpu
