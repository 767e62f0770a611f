// Argument checks that every codec makes before it runs a batch of jobs, and helpers that read a format.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "zcomm/codec.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {

inline void check_aligned(const char* argument, const void* data, std::size_t alignment) {
  const auto offset = reinterpret_cast<std::uintptr_t>(data) % alignment;
  check_argument(offset == 0, argument, ": expected an address that is a multiple of ", alignment, ", got ", offset,
                 " bytes past one");
}

inline void check_aligned(const char* argument, const void* data, std::size_t alignment, std::int64_t num_elements) {
  check_argument(num_elements == 0 || data != nullptr, argument, ": expected memory of ", num_elements,
                 " elements, got a null pointer");
  check_aligned(argument, data, alignment);
}

inline void check_format(BlockFormat format) {
  check_argument(format.is_valid(), [&] {
    const BlockFormat parsed = BlockFormat::parse(format.to_string());  // its error names most mistakes
    return "format: expected a block size of 0 with " + parsed.to_string() + ", got " +
           std::to_string(format.block_size);
  });
}

inline void check_float(DType dtype) {
  check_argument(is_float(dtype), "dtype: expected float32, bfloat16 or float16, got ", to_string(dtype));
}

inline void check_values(ConstTensorView values) {
  to_string(values.dtype);
  check_argument(values.num_elements >= 0, "values: expected 0 or more elements, got ", values.num_elements);
  check_aligned("values", values.data, element_size(values.dtype), values.num_elements);
}

inline void check_wire(const Wire& wire, std::int64_t num_elements) {
  check_format(wire.format);
  if (wire.format.kind != ElementKind::exact) check_float(wire.dtype);
  const bool exact = wire.format.kind == ElementKind::exact;
  check_aligned("wire", wire.data, exact ? element_size(wire.dtype) : kWireAlignment, num_elements);
  check_argument(std::isfinite(wire.factor), "wire: expected a finite factor, got ", wire.factor);
}

inline void check_rounding(const Rounding& rounding) {
  check_argument(rounding.first_element >= 0 && rounding.first_element % kMinBlockSize == 0,
                 "first_element: expected a multiple of ", kMinBlockSize, ", 0 or more, got ", rounding.first_element);
}

// The different rotations of wires, in the order of their first wires. An array, as calls must not allocate.
class Rotations {
 public:
  explicit Rotations(std::span<const Wire> wires) {
    for (const Wire& wire : wires) {
      const int rotation = wire.format.rotation();
      if (rotation != 0 && std::find(begin(), end(), rotation) == end()) sizes_[num_++] = rotation;
    }
  }
  const int* begin() const { return sizes_; }
  const int* end() const { return sizes_ + num_; }

 private:
  int sizes_[5] = {};  // 32, 64, 128, 256 and 512
  int num_ = 0;
};

// Checks that sums of `source` wires can be encoded to `target`. A tile has whole blocks of the target, and a codec
// rotates whole blocks of the source inside it.
inline void check_summed(BlockFormat source, BlockFormat target) {
  const bool is_power = (target.block_size & (target.block_size - 1)) == 0;
  check_argument(!rotates_blocks(source.kind) || is_power,
                 "format: expected a block size that is a power of two for a sum of ", source, " wires, got ", target);
}

inline void check_wires(std::span<const Wire> wires, std::int64_t num_elements) {
  check_argument(!wires.empty(), "wires: expected at least one, got none");
  for (const Wire& wire : wires) {
    check_float(wire.dtype);
    check_wire(wire, num_elements);
  }
}

inline void check(const Encode& job) {
  check_values(job.values);
  check_format(job.format);
  if (job.format.kind != ElementKind::exact) check_float(job.values.dtype);
  check_aligned("wire", job.wire, kWireAlignment, job.values.num_elements);
  check_rounding(job.rounding);
}

inline void check(const Decode& job) {
  check_values(job.values);
  check_wire(job.wire, job.values.num_elements);
  if (job.values.dtype != job.wire.dtype) check_float(job.values.dtype), check_float(job.wire.dtype);
  check_argument(job.wire.factor == 1.0f, "wire: expected a factor of 1 to decode, got ", job.wire.factor,
                 ": decode_sum takes others");
  check_argument(!job.wire.nan_is_zero, "wire: expected no nan_is_zero to decode, got it: decode_sum takes it");
}

inline void check(const DecodeSum& job) {
  check_values(job.values);
  check_float(job.values.dtype);
  check_wires(job.wires, job.values.num_elements);
}

inline void check(const DecodeSumEncode& job) {
  check_argument(job.num_elements >= 0, "num_elements: expected 0 or more, got ", job.num_elements);
  check_wires(job.wires, job.num_elements);
  check_format(job.format);
  for (const Wire& wire : job.wires) {
    check_argument(wire.data != job.wire || wire.format == job.format || job.num_elements == 0,
                   "wire: expected memory apart from a wire of another format, ", wire.format, ", got the same");
  }
  for (const Wire& wire : job.wires) check_summed(wire.format, job.format);
  check_aligned("wire", job.wire, kWireAlignment, job.num_elements);
  check_rounding(job.rounding);
}

// Returns the element type of a wire without scales.
inline DType value_dtype(const Wire& wire) {
  return wire.format.kind == ElementKind::bf16 ? DType::bfloat16 : wire.dtype;
}

}  // namespace zcomm
