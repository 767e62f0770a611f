// Values <-> wire bytes, on one device. A codec knows nothing of ranks. The format is written down in
// docs/wire_format.md and executable in zcomm/reference.py; every implementation gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zcomm/block_format.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

class DeviceDifferences;
class DifferenceCodec;

// Encoded values, borrowed. Their number is that of the job that reads them. With ElementKind::exact these are plain
// values of type `dtype`, at any address that is aligned to an element: a rank's own contribution to a sum needs no
// encoding. All other wires are aligned to kWireAlignment.
struct Wire {
  const std::byte* data = nullptr;
  BlockFormat format;
  DType dtype = DType::float32;
  float factor = 1.0f;       // of the values, finite; in a Decode 1
  bool nan_is_zero = false;  // a value that is NaN counts as 0; in a Decode false
};

// The random bits of formats with `stochastic`; others do not look at it. They depend on the seed and on an element's
// index in the whole message alone: pieces of a message that are encoded one by one give the codes of the whole.
struct Rounding {
  std::uint64_t seed = 0;
  std::int64_t first_element = 0;  // index of the job's first element, a multiple of 32
};

struct Encode {
  ConstTensorView values;
  BlockFormat format;
  std::byte* wire = nullptr;  // WireLayout(format, values.dtype, values.num_elements).num_bytes, 16-byte aligned
  Rounding rounding = {};
};

struct Decode {
  Wire wire;
  TensorView values;
};

// values = factor * (wires[0] + wires[1] + ...), each wire times its own factor. First the wires that are rotated, in
// the order given; their sum is rotated back; then the others, in the order given. Added in float32, multiplied in
// float32 and rounded to nearest even once. `values` may be one of the wires if that is exact and of the same dtype.
struct DecodeSum {
  std::span<const Wire> wires;  // at least one
  float factor = 1.0f;
  TensorView values;
  bool read_late = false;  // nobody reads `values` soon: a CPU writes them past its caches
};

// wire = encode(wires[0] + wires[1] + ...) with the float32 sum, as in DecodeSum, never written to memory. `wire` may
// be one of the wires if that has the same format: a residual is updated in place.
struct DecodeSumEncode {
  std::span<const Wire> wires;  // at least one
  std::int64_t num_elements = 0;
  BlockFormat format;         // ElementKind::exact: the float32 sums
  std::byte* wire = nullptr;  // WireLayout(format, DType::float32, num_elements).num_bytes, 16-byte aligned
  Rounding rounding = {};
};

// Each call takes a batch of independent jobs: one kernel launch on a GPU, one parallel loop on a CPU. On a CPU the
// call returns when the work is done, on a GPU when it is queued on `stream`. The jobs themselves, and the spans that
// they hold, are read before the call returns.
//
// Numbers. A block's scale is max(|x|) / max_code rounded up to bfloat16, at least 2^-126; a code is x * (1 / scale)
// rounded to nearest even, or up or down at random; a decoded value is code * scale in float32. A NaN or infinity
// anywhere in a block makes the whole block NaN. A block of finite values never decodes to infinity: `decode` saturates
// at the largest finite value of its output type, and the terms of a sum saturate at the largest finite float32.
class [[gnu::visibility("default")]] Codec {
 public:
  virtual ~Codec() = default;
  virtual void encode(std::span<const Encode> jobs, StreamView stream) const = 0;
  virtual void decode(std::span<const Decode> jobs, StreamView stream) const = 0;
  virtual void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const = 0;
  virtual void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const = 0;
  // Of lossless differences in host memory, with the same kernels; null where there is none.
  virtual const DifferenceCodec* differences() const { return nullptr; }
  // Of lossless differences in the memory of a GPU; null where there is none.
  virtual const DeviceDifferences* device_differences() const { return nullptr; }
};

// Instruction sets that this build has kernels for and this machine can run, slowest first; never empty.
std::vector<std::string> cpu_isas();

// The codec for host memory. `isa` is one of cpu_isas(); empty means ZCOMM_ISA if that is set, else the fastest.
// Throws ArgumentError if the named one is not there.
std::unique_ptr<Codec> make_cpu_codec(std::string_view isa = {});

// Threads that host codecs share, the caller's included; at least 1. Process-wide; 1 until set.
void set_num_threads(int num_threads);
int num_threads();

}  // namespace zcomm
