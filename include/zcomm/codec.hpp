// Codecs: values <-> wire bytes, on one device. A codec knows nothing of ranks. docs/wire_format.md specifies the
// format and bench/zcomm_bench/reference.py executes it; every implementation gives the same bits.
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

class LosslessCodec;

// Encoded values, borrowed; the job that reads them knows their number. With ElementKind::exact these are plain values
// of type `dtype`, aligned to an element: a rank's own contribution to a sum needs no encoding. All other wires are
// aligned to kWireAlignment.
struct Wire {
  const std::byte* data = nullptr;
  BlockFormat format;
  DType dtype = DType::float32;
  float factor = 1.0f;       // multiplies the values; finite, 1 in a Decode
  bool nan_is_zero = false;  // counts NaN values as 0; false in a Decode
};

// Random stream of formats with `stochastic`; other formats ignore it. Random bits depend only on the seed and on an
// element's index in the whole message. So pieces that are encoded one by one give the codes of the whole.
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

// Computes values = factor * (wires[0] + wires[1] + ...), each wire times its own factor. Rotated wires are added
// first, in the order given, and their sum is rotated back; then the others are added in the order given. Sums and the
// product are float32, rounded to nearest even once. `values` may be an exact wire of the same dtype.
struct DecodeSum {
  std::span<const Wire> wires;  // at least one
  float factor = 1.0f;
  TensorView values;
  bool read_late = false;  // `values` is not read soon: a CPU writes it past its caches
};

// Computes wire = encode(wires[0] + wires[1] + ...). The sum is float32, as in DecodeSum, and is never written to
// memory. `wire` may be one of the wires if that has the same format: a residual is updated in place.
struct DecodeSumEncode {
  std::span<const Wire> wires;  // at least one
  std::int64_t num_elements = 0;
  BlockFormat format;         // ElementKind::exact: the float32 sums
  std::byte* wire = nullptr;  // WireLayout(format, DType::float32, num_elements).num_bytes, 16-byte aligned
  Rounding rounding = {};
};

// Codec for one kind of memory. Each call takes a batch of independent jobs: one kernel launch on a GPU, one parallel
// loop on a CPU. On a CPU the call returns when the work is done, on a GPU when it is queued on `stream`. The jobs and
// the spans in them are read before the call returns. Throws ArgumentError on an invalid job, before any job begins.
//
// Arithmetic: a block's scale is max(|x|) / max_code rounded up to bfloat16, at least 2^-126. A code is x * (1 /
// scale), rounded to nearest even or stochastically. A decoded value is code * scale in float32. A NaN or infinity
// anywhere in a block makes the whole block NaN. A block of finite values never decodes to infinity: `decode` saturates
// at the largest finite value of its output type, terms of a sum at the largest finite float32.
class [[gnu::visibility("default")]] Codec {
 public:
  virtual ~Codec() = default;
  virtual void encode(std::span<const Encode> jobs, StreamView stream) const = 0;
  virtual void decode(std::span<const Decode> jobs, StreamView stream) const = 0;
  virtual void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const = 0;
  virtual void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const = 0;
  // Returns the codec of lossless differences in the same memory; null if there is none.
  virtual const LosslessCodec* lossless() const { return nullptr; }
};

// Lists the instruction sets that this build has kernels for and this machine runs, slowest first; never empty.
std::vector<std::string> cpu_isas();

// Makes the codec for host memory. `isa` is one of cpu_isas(); empty means ZCOMM_ISA if it is set, else the fastest.
// Throws ArgumentError if this machine does not run the named one.
std::unique_ptr<Codec> make_cpu_codec(std::string_view isa = {});

// Sets the number of threads that host codecs share, the caller's included; at least 1. Process-wide, initially 1.
void set_num_threads(int num_threads);
int num_threads();

}  // namespace zcomm
