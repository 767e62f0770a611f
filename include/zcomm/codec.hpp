// Codecs: they turn values into wires and wires into values or sums, on one device. A codec knows nothing of ranks.
// docs/wire_format.md specifies the format and bench/zcomm_bench/reference.py executes it. Every implementation gives
// the same bits.
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

// Encoded values, borrowed. The job that reads them knows the number of elements.
//
// With ElementKind::exact these are plain values of type `dtype`, so a rank's own contribution to a sum needs no
// encoding. Such a wire is aligned to an element, all other wires to kWireAlignment.
struct Wire {
  const std::byte* data = nullptr;
  BlockFormat format;
  DType dtype = DType::float32;  // of the values that were encoded
  float factor = 1.0f;           // multiplies the values; finite, and 1 in a Decode
  bool nan_is_zero = false;      // counts NaN values as 0; false in a Decode
};

// Random stream of a format with `stochastic`. Other formats ignore it.
//
// Random bits depend only on the seed and on an element's index in the whole message. So pieces that are encoded one by
// one give the codes of the whole. The bits come from Philox4x32-10 (Salmon et al., SC 2011).
struct Rounding {
  std::uint64_t seed = 0;
  std::int64_t first_element = 0;  // index of the job's first element, a multiple of 32
};

// Job that computes wire = encode(values).
struct Encode {
  ConstTensorView values;  // floats, or any values with ElementKind::exact
  BlockFormat format;
  std::byte* wire = nullptr;  // wire_bytes(format, values.dtype, values.num_elements), aligned to kWireAlignment
  Rounding rounding = {};     // read only if `format` is stochastic
};

// Job that computes values = decode(wire).
// `values` may have another dtype than the wire if both are floats. Finite values saturate at its largest finite value.
struct Decode {
  Wire wire;
  TensorView values;
};

// Job that computes values = factor * (wires[0] + wires[1] + ...), each wire times its own factor.
//
// A codec first sums the wires of each rotation, in the order given, and rotates each sum back.
// Then it adds the other wires in the order given. Sums and the product are float32, and the result is rounded once, to
// nearest even. All dtypes must be floats. `values` may be the memory of an exact wire of the same dtype.
struct DecodeSum {
  std::span<const Wire> wires;  // at least one
  float factor = 1.0f;
  TensorView values;
  bool read_late = false;  // `values` is not read soon, so a CPU writes it past its caches
};

// Job that computes wire = encode(wires[0] + wires[1] + ...).
//
// The sum is float32, as in DecodeSum, and is never written to memory. `wire` may be one of the wires if both have the
// same format, so that a residual is updated in place.
struct DecodeSumEncode {
  std::span<const Wire> wires;  // at least one
  std::int64_t num_elements = 0;
  BlockFormat format;         // ElementKind::exact: the float32 sums
  std::byte* wire = nullptr;  // wire_bytes(format, DType::float32, num_elements), aligned to kWireAlignment
  Rounding rounding = {};     // read only if `format` is stochastic
};

// Codec for one kind of memory.
//
// Each call takes a batch of independent jobs: one parallel loop on a CPU, one launch per kind of kernel on a GPU.
// On a CPU a call ignores `stream` and returns when the work is done. On a GPU it returns when the work is queued on
// `stream`. The jobs and the spans in them are read before the call returns. The memory of values and wires is borrowed
// until the work has completed.
// Every call throws ArgumentError on an invalid job, before any job begins: a null or misaligned address, a format that
// is not valid, or a dtype that the format does not take.
//
// Arithmetic, but for EDEN's kinds: a block's scale is max(|x|) / max_code rounded up to bfloat16, at least 2^-126. A
// code is x * (1 / scale), rounded to nearest even or stochastically. A decoded value is code * scale in float32. A NaN
// or an infinity anywhere in a block makes the whole block NaN. A block of finite values never decodes to infinity:
// `decode` saturates at the largest finite value of its output type, a term of a sum at the largest finite float32.
//
// Example, on a CPU:
//   std::vector<float> numbers(1000, 0.5f);
//   auto* const bytes = reinterpret_cast<std::byte*>(numbers.data());
//   const TensorView values{bytes, 1000, DType::float32};
//   const BlockFormat format = BlockFormat::parse("int8:256");
//   const auto workspace = make_host_workspace();
//   const Scratch wire(*workspace, wire_bytes(format, values.dtype, values.num_elements), {});
//   const auto codec = make_cpu_codec();
//   const Encode encode{values, format, wire.data(), {}};
//   codec->encode({&encode, 1}, {});
//   const Decode decode{{wire.data(), format, values.dtype}, values};
//   codec->decode({&decode, 1}, {});
class [[gnu::visibility("default")]] Codec {
 public:
  virtual ~Codec() = default;

  // Encodes values into wires.
  virtual void encode(std::span<const Encode> jobs, StreamView stream) const = 0;

  // Decodes wires into values. With ElementKind::exact and equal dtypes this is a copy, bit by bit.
  virtual void decode(std::span<const Decode> jobs, StreamView stream) const = 0;

  // Decodes wires and sums them into values.
  virtual void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const = 0;

  // Decodes wires and encodes their sum.
  virtual void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const = 0;

  // Returns the codec of lossless differences in the same memory; null if there is none.
  virtual const LosslessCodec* lossless() const { return nullptr; }
};

// Returns the instruction sets that this build has kernels for and this machine supports, slowest first.
// The result is never empty.
std::vector<std::string> cpu_isas();

// Makes the codec for host memory. Several threads may use it at a time.
// `isa` is one of cpu_isas(). Empty means the environment variable ZCOMM_ISA if it is set, else the fastest.
// Throws ArgumentError if this machine does not support the instruction set. All of them give the same bits.
std::unique_ptr<Codec> make_cpu_codec(std::string_view isa = {});

// Sets the number of threads that all host codecs of the process share, the calling thread included. It is 1 initially.
// Throws ArgumentError if it is less than 1. Thread-safe.
void set_num_threads(int num_threads);

// Returns the number of threads that host codecs share. Thread-safe.
int num_threads();

}  // namespace zcomm
