// Operations of the kernels on tiles of values and wires, which every task of the codec calls. Wires are checked
// before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/cpu/kernels.hpp"
#include "zcomm/codec.hpp"

namespace zcomm::cpu {

inline std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

// Returns blocks of a format, without addresses.
CodedBlocks blocks_of(BlockFormat format);

// Returns the address of element i of a wire without scales.
const std::byte* value_at(const Wire& wire, std::int64_t i);

// Decodes elements [begin, begin + values.num_elements) of a wire of `num_elements`, saturated. At most a tile.
// `stream`: see Kernels.
void decode_tile(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                 TensorView values, bool stream);

// Sums elements [begin, begin + count) of wires of `num_elements` into `terms`. At most a tile.
void sum_tile(const Kernels& kernels, std::span<const Wire> wires, std::int64_t num_elements, std::int64_t begin,
              std::int64_t count, float* terms);

// Decodes and sums elements [begin, begin + values.num_elements) of the job. At most a tile. `stream`: see Kernels.
void decode_sum_tile(const Kernels& kernels, const DecodeSum& job, std::int64_t begin, TensorView values, bool stream);

}  // namespace zcomm::cpu
