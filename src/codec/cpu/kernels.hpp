// Loops of the host codec, as one table per instruction set.
//
// kernels.inl is compiled once per instruction set. If two of those files shared an inline function or template, the
// linker would keep one copy, perhaps the AVX-512 one, and the baseline would call that. So this header and everything
// it includes hold no code, and kernels.inl is an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/element_kind.hpp"

namespace zcomm::cpu {

// Elements in the buffers between two kernels: 16 KiB of float32, which is half of an L1 cache and the largest block.
// Tiles begin at multiples of 32 elements, so at a whole byte of int4 codes.
inline constexpr std::int64_t kTileElements = 4096;

// Bytes of values (at least one block) per encode step, while the largest magnitudes of the next step are found. Both
// steps, and copies of them, should fit in an L1 cache.
inline constexpr std::int64_t kEncodeTileBytes = 4096;

// Threshold for rotating back: a block with a larger or equal term is scaled down, as a sum of 512 may overflow.
inline constexpr float kLargeTerm = 0x1p119f;

inline constexpr int kMaxWires = 4;  // per pass of a sum

inline constexpr int kNumDTypes = 3;  // in the order of DType

// Scales and codes of a wire.
struct CodedBlocks {
  const std::byte* scales;
  const std::byte* codes;
  std::int64_t block_size;
  ElementKind kind;  // that has scales
  float max_code;
  float largest_code;  // of any code, also one that no encoder writes: max_code + 1, or 480 for e4m3
  float factor;
  std::int64_t rotation;  // elements rotated together, or 0: encode_tile rotates, decode's result goes to rotate_back
  bool stochastic;        // encode_tile rounds at random
};

// Kernel table. Arithmetic is float32, rounded to nearest even; the caller sets the floating-point environment.
struct Kernels {
  const char* isa;  // one of cpu_isas()

  // Loads or adds: terms[i] (+)= values[i], NaNs with any bits. `count` is at most kTileElements here and below.
  void (*load_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);
  void (*add_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);

  // Decodes: values[i] = code * (scale * factor) of element begin + i, saturated at +-limit, which is at most the
  // dtype's largest finite value. A NaN scale gives the dtype's canonical NaN. `stream` writes past the caches, see
  // stream() below; `values` is then aligned to 64.
  void (*decode[kNumDTypes])(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit, std::byte* values,
                             bool stream);
  // Loads or adds the float32 values of up to kMaxWires wires, in order: terms[i] (+)= ... The wires hold integers of
  // the same kind and block size, with a factor of 1.
  void (*sum_codes)(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
                    float* terms);
  void (*add_codes)(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
                    float* terms);

  // Stores the same sum: values[i] = round(sum * factor), as store_values does. `stream` as above.
  void (*sum_values[kNumDTypes])(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count,
                                 float limit, float factor, std::byte* values, bool stream);

  // Saturates finite terms at +-limit.
  void (*saturate)(float* terms, std::int64_t count, float limit);

  // Stores: values[i] = round(terms[i] * factor); overflow becomes infinity, NaNs canonical. Any count. `stream` as
  // above.
  void (*store_values[kNumDTypes])(const float* terms, std::int64_t count, float factor, std::byte* values,
                                   bool stream);

  // Rotates each `rotation` terms back, after them each 32, in place or not; NaNs become canonical. `none_is_large`
  // skips a search: the caller knows that all terms are numbers below kLargeTerm.
  void (*rotate_back)(const float* terms, std::int64_t count, std::int64_t rotation, bool none_is_large,
                      float* rotated);

  // Copies past the caches: see kStreamBytes. end_stream() orders the copies before the thread's later writes.
  void (*stream)(const std::byte* source, std::int64_t num_bytes, std::byte* destination);
  void (*end_stream)();

  // Encodes blocks of int8 or int4, rounded to nearest; the last block may be short. Writes only scales and codes. Any
  // count. `blocks` gives the format; its addresses and factor are ignored. `stream` writes int8 and int4
  // codes past the caches if `codes` is aligned to 32 (int4: 16).
  void (*encode[kNumDTypes])(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::byte* scales,
                             std::byte* codes, bool stream);
  // Encodes at most a tile of the other formats: fp8, EDEN's, and integers rounded stochastically. The seed and the
  // index of the first element are those of Rounding in codec.hpp.
  void (*encode_tile[kNumDTypes])(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::uint64_t seed,
                                  std::int64_t first_element, std::byte* scales, std::byte* codes);
};

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;

}  // namespace zcomm::cpu
