// The loops of the host codec, as a table per instruction set.
//
// kernels.inl is compiled once per instruction set. An inline function or template that two of those files shared would
// be merged by the linker into one copy, perhaps the AVX-512 one, which the baseline would then call. So this header
// and what it includes, all that those files see, hold no code, and kernels.inl is an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/code_kind.hpp"

namespace zcomm::cpu {

// Values between two kernels live in buffers of this many elements (16 KiB of float32: half of an L1 cache, and the
// largest block). Tiles begin at multiples of 32 elements, so at a whole byte of int4 codes.
inline constexpr std::int64_t kTileElements = 4096;

// Bytes of values, or one block, that are encoded at a time, while the largest magnitudes of the next as many are
// looked for. Both, and copies of them, should stay in an L1 cache.
inline constexpr std::int64_t kEncodeTileBytes = 4096;

// Groups with a term of this magnitude or more are rotated back scaled down: the sum of 32 of them may overflow.
inline constexpr float kLargeTerm = 0x1p123f;

inline constexpr int kMaxWires = 4;  // that are added in one pass

inline constexpr int kNumDTypes = 3;  // in the order of DType

// The two parts of a wire with scales.
struct CodedBlocks {
  const std::byte* scales;
  const std::byte* codes;
  std::int64_t block_size;
  CodeKind kind;
  float max_code;
  float largest_code;  // its magnitude, codes that no encoder writes included: an integer more, or 480 of e4m3
  float factor;
  bool hadamard;  // codes are those of rotated values: encode_tile rotates them, and rotate_back what decode gives
};

// Where random bits come from: see Rounding in codec.hpp.
struct Random {
  std::uint64_t seed;
  std::int64_t first_element;
};

// Arithmetic is float32, rounded to nearest even; the caller sees to the floating-point environment.
struct Kernels {
  // terms[i] = or += values[i], NaNs with any bits. `count` is up to kTileElements here and below.
  void (*load_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);
  void (*add_values[kNumDTypes])(const std::byte* values, std::int64_t count, float* terms);

  // values[i] = code * (scale * factor) of element begin + i, saturated at +-limit, the largest finite value of the
  // dtype or less. A NaN scale gives the dtype's canonical NaN. `stream`: writes past the caches, see stream() below;
  // `values` is aligned to 64 then.
  void (*decode[kNumDTypes])(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit, std::byte* values,
                             bool stream);
  // terms[i] = or += the float32 value of each of up to kMaxWires wires, one after the other: integers of the same kind
  // and block size, with a factor of 1.
  void (*sum_codes)(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
                    float* terms);
  void (*add_codes)(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
                    float* terms);

  // values[i] = round(the same sum * factor), as store_values would write it. `stream` as above.
  void (*sum_values[kNumDTypes])(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count,
                                 float limit, float factor, std::byte* values, bool stream);

  // Finite terms beyond +-limit become +-limit.
  void (*saturate)(float* terms, std::int64_t count, float limit);

  // values[i] = round(terms[i] * factor), too large ones to infinity, NaNs canonical. Any count. `stream` as above.
  void (*store_values[kNumDTypes])(const float* terms, std::int64_t count, float factor, std::byte* values,
                                   bool stream);

  // Rotates whole groups of 32 back, in place or not; NaNs are canonical. `none_is_large`: all terms are known to be
  // numbers of less than kLargeTerm, which need not be looked for.
  void (*rotate_back)(const float* terms, std::int64_t count, bool none_is_large, float* rotated);

  // Copies past the caches: see kStreamBytes. end_stream() orders the copies before what the thread writes next.
  void (*stream)(const std::byte* source, std::int64_t num_bytes, std::byte* destination);
  void (*end_stream)();

  // Encodes blocks of integers, rounded to nearest, not rotated; the last one may be short. Writes nothing but scales
  // and codes. Any count. `blocks` says how; its addresses and its factor are not used. `stream`: codes of int8
  // and int4 go past the caches if `codes` is aligned to 32, of int4 to 16.
  void (*encode[kNumDTypes])(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::byte* scales,
                             std::byte* codes, bool stream);
  // The same for all codes, rotated or not; integers are rounded stochastically if `random` is not null. Up to a
  // tile.
  void (*encode_tile[kNumDTypes])(const std::byte* values, std::int64_t count, CodedBlocks blocks, const Random* random,
                                  std::byte* scales, std::byte* codes);
};

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace zcomm::cpu
