#include "codec/cpu/tiles.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/checks.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::cpu {
namespace {

constexpr float kMaxFloat32 = std::numeric_limits<float>::max();
constexpr float kLargestFinite[kNumDTypes] = {kMaxFloat32, 0x1.fep127f, 65504.0f};

CodedBlocks coded_blocks(const Wire& wire, std::int64_t num_elements) {
  const WireLayout layout(wire.format, wire.dtype, num_elements);
  CodedBlocks blocks = blocks_of(wire.format);
  blocks.scales = wire.data;
  blocks.codes = wire.data + layout.codes_offset;
  blocks.factor = wire.factor;
  return blocks;
}

// Returns a bound of the terms of these blocks, from their scales; infinity if there is a NaN.
float largest_term(const CodedBlocks& blocks, std::int64_t begin, std::int64_t count) {
  std::uint16_t largest = 0;  // magnitude; its bits order like its value. Wires that no codec wrote may have a sign
  for (std::int64_t i = begin / blocks.block_size; i * blocks.block_size < begin + count; ++i) {
    std::uint16_t scale;
    std::memcpy(&scale, blocks.scales + kScaleBytes * static_cast<std::size_t>(i), kScaleBytes);
    largest = std::max(largest, static_cast<std::uint16_t>(scale & 0x7fffu));
  }
  const float term = std::bit_cast<float>(std::uint32_t{largest} << 16) * blocks.largest_code;
  return std::isnan(term) ? std::numeric_limits<float>::infinity() : term;
}

// Tells whether a sum can add wires of this kind without buffering their terms.
bool is_plain(const Wire& wire) {
  return wire.format.has_scales() && wire.format.kind != ElementKind::fp8 && wire.factor == 1.0f && !wire.nan_is_zero;
}

// Sets `terms` to elements [begin, begin + count) of a wire of `num_elements`, times its factor. At most a tile.
void load_terms(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                std::int64_t count, float* terms) {
  constexpr std::size_t kFloat32 = static_cast<std::size_t>(DType::float32);
  std::byte* bytes = reinterpret_cast<std::byte*>(terms);
  if (wire.format.has_scales()) {
    kernels.decode[kFloat32](coded_blocks(wire, num_elements), begin, count, kMaxFloat32, bytes, false);
  } else {
    kernels.load_values[index_of(value_dtype(wire))](value_at(wire, begin), count, terms);
    if (wire.factor != 1.0f) kernels.store_values[kFloat32](terms, count, wire.factor, bytes, false);
  }
  if (wire.nan_is_zero) std::replace_if(terms, terms + count, [](float term) { return std::isnan(term); }, 0.0f);
}

// Sets `blocks` to wires[0] and the following wires that one pass can add. Returns their number, 0 if wires[0] is not
// plain.
std::size_t plain_blocks(std::span<const Wire> wires, std::int64_t num_elements, CodedBlocks* blocks) {
  std::size_t num_wires = 0;
  for (; num_wires < std::min<std::size_t>(kMaxWires, wires.size()); ++num_wires) {
    if (!is_plain(wires[num_wires]) || wires[num_wires].format != wires[0].format) break;
    blocks[num_wires] = coded_blocks(wires[num_wires], num_elements);
  }
  return num_wires;
}

// Sets (`is_empty`) or adds to `terms` elements [begin, begin + count) of wires[0] and of the wires that are added with
// it. Returns the number of wires.
std::size_t add_terms(const Kernels& kernels, std::span<const Wire> wires, std::int64_t num_elements,
                      std::int64_t begin, std::int64_t count, bool is_empty, float* terms) {
  const Wire& wire = wires[0];
  CodedBlocks blocks[kMaxWires];
  if (const std::size_t num_wires = plain_blocks(wires, num_elements, blocks)) {
    const auto add_codes = is_empty ? kernels.sum_codes : kernels.add_codes;
    add_codes(blocks, static_cast<int>(num_wires), begin, count, kMaxFloat32, terms);
    return num_wires;
  }
  if (is_empty) std::fill_n(terms, count, 0.0f);
  if (!wire.format.has_scales() && wire.factor == 1.0f && !wire.nan_is_zero) {
    kernels.add_values[index_of(value_dtype(wire))](value_at(wire, begin), count, terms);
    return 1;
  }
  alignas(64) float others[kTileElements];
  load_terms(kernels, wire, num_elements, begin, count, others);
  kernels.add_values[index_of(DType::float32)](reinterpret_cast<const std::byte*>(others), count, terms);
  return 1;
}

}  // namespace

CodedBlocks blocks_of(BlockFormat format) {
  const CodeKind kind = code_kind(format.kind);
  const float max_code = traits(format.kind).max_code;
  const float largest_code = kind == CodeKind::fp8 ? 480.0f : max_code + 1;
  return {nullptr, nullptr, format.block_size, kind, max_code, largest_code, 1.0f, format.hadamard};
}

const std::byte* value_at(const Wire& wire, std::int64_t i) {
  return wire.data + static_cast<std::size_t>(i) * element_size(value_dtype(wire));
}

void decode_tile(const Kernels& kernels, const Wire& wire, std::int64_t num_elements, std::int64_t begin,
                 TensorView values, bool stream) {
  const std::size_t dtype = index_of(values.dtype);
  if (wire.format.has_scales() && !wire.format.hadamard) {
    kernels.decode[dtype](coded_blocks(wire, num_elements), begin, values.num_elements, kLargestFinite[dtype],
                          values.data, stream);
    return;
  }
  alignas(64) float terms[kTileElements];
  if (wire.format.hadamard) {
    const CodedBlocks blocks = coded_blocks(wire, num_elements);
    kernels.decode[index_of(DType::float32)](blocks, begin, values.num_elements, kMaxFloat32,
                                             reinterpret_cast<std::byte*>(terms), false);
    const float largest = largest_term(blocks, begin, values.num_elements);
    const bool is_in_place = values.dtype == DType::float32 && !stream;
    float* rotated = is_in_place ? reinterpret_cast<float*>(values.data) : terms;
    kernels.rotate_back(terms, values.num_elements, largest < kLargeTerm, rotated);
    if (is_in_place) return;
    // Saturates where the bound on a sum of 32 terms, rounding included, exceeds the limit.
    if (largest * 33.0f > kLargestFinite[dtype]) kernels.saturate(terms, values.num_elements, kLargestFinite[dtype]);
  } else {
    kernels.load_values[index_of(value_dtype(wire))](value_at(wire, begin), values.num_elements, terms);
    kernels.saturate(terms, values.num_elements, kLargestFinite[dtype]);
  }
  kernels.store_values[dtype](terms, values.num_elements, 1.0f, values.data, stream);
}

void sum_tile(const Kernels& kernels, std::span<const Wire> wires, std::int64_t num_elements, std::int64_t begin,
              std::int64_t count, float* terms) {
  bool is_empty = true;
  for (const bool rotated : {true, false}) {
    for (std::size_t i = 0; i < wires.size();) {
      if (wires[i].format.hadamard != rotated) {
        ++i;
        continue;
      }
      if (is_empty && !wires[i].format.has_scales()) {
        load_terms(kernels, wires[i], num_elements, begin, count, terms);
        ++i;
      } else {
        i += add_terms(kernels, wires.subspan(i), num_elements, begin, count, is_empty, terms);
      }
      is_empty = false;
    }
    if (rotated && !is_empty) kernels.rotate_back(terms, count, false, terms);
  }
}

void decode_sum_tile(const Kernels& kernels, const DecodeSum& job, std::int64_t begin, TensorView values, bool stream) {
  const std::size_t dtype = index_of(values.dtype);
  CodedBlocks blocks[kMaxWires];
  const std::size_t num_plain = plain_blocks(job.wires, job.values.num_elements, blocks);
  if (num_plain == job.wires.size() && !job.wires[0].format.hadamard) {
    kernels.sum_values[dtype](blocks, static_cast<int>(num_plain), begin, values.num_elements, kMaxFloat32, job.factor,
                              values.data, stream);
    return;
  }
  alignas(64) float terms[kTileElements];
  sum_tile(kernels, job.wires, job.values.num_elements, begin, values.num_elements, terms);
  kernels.store_values[dtype](terms, values.num_elements, job.factor, values.data, stream);
}

}  // namespace zcomm::cpu
