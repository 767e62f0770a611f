// The loops of the host codec, as a table per instruction set.
//
// kernels.inl is compiled once per instruction set. An inline function or template that two of those files shared would
// be merged by the linker into one copy, perhaps the AVX-512 one, which the baseline would then call. So this header,
// all that those files include, holds no code, and kernels.inl is an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::cpu {

// Values between two kernels live in buffers of this many elements (16 KiB of float32: half of an L1 cache, and the
// largest block). Tiles begin at multiples of 32 elements, so at a whole byte of int4 codes.
inline constexpr std::int64_t kTileElements = 4096;

inline constexpr int kMaxWires = 4;  // that are added in one pass

inline constexpr int kNumDTypes = 3;  // in the order of DType
inline constexpr int kNumCodes = 2;   // int8, int4

// The two parts of a wire with scales.
struct CodedBlocks {
  const std::byte* scales;
  const std::byte* codes;
  std::int64_t block_size;
};

// Arithmetic is float32, rounded to nearest even; the caller sees to the floating-point environment.
struct Kernels {
  // terms[i] = or += values[i], NaNs with any bits. `count` is up to kTileElements here and below.
  void (*load_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);
  void (*add_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);

  // values[i] = code * scale of element begin + i, saturated at +-limit, the largest finite value of the dtype or less.
  // A NaN scale gives the dtype's canonical NaN.
  void (*decode[kNumCodes][kNumDTypes])(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit,
                                        std::byte* values);
  // terms[i] += the float32 value of each of up to kMaxWires wires with the same block size, one after the other.
  void (*add_codes[kNumCodes])(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count,
                               float limit, float* terms);

  // Finite terms beyond +-limit become +-limit.
  void (*saturate)(float* terms, std::int64_t count, float limit);

  // values[i] = round(terms[i] * factor), too large ones to infinity, NaNs canonical. Any count.
  void (*store_values[kNumDTypes])(const float* terms, std::int64_t count, float factor, std::byte* values);

  // Copies past the caches: see kStreamBytes. end_stream() orders the copies before what the thread writes next.
  void (*stream)(const std::byte* source, std::int64_t num_bytes, std::byte* destination);
  void (*end_stream)();

  // Encodes blocks; the last one may be short. Writes nothing but scales and codes. Any count.
  void (*encode[kNumCodes][kNumDTypes])(const std::byte* values, std::int64_t count, std::int64_t block_size,
                                        std::byte* scales, std::byte* codes);
};

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace zcomm::cpu
