// Lossless differences of 16-bit floats: what is sent of weights to a rank that still holds their last values.
//
// From one optimizer step to the next a weight changes by few units in the last place, and the decoder can tell about
// how many: it knows the exponent of the old value. docs/wire_format.md has the code; zcomm/difference_reference.py
// executes it. Every bit pattern survives: NaN payloads, infinities, the sign of zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

namespace difference {
struct Kernels;
}

// Values that are coded on their own.
inline constexpr std::int64_t kDifferenceTile = 2048;

// The most bytes that `num_elements` values take as a difference, a multiple of 16: 2 bytes each, 2 per tile, and
// padding.
std::size_t max_difference_bytes(std::int64_t num_elements);

// What a message begins with: its size, and what it may be added to.
struct DifferenceHeader {
  enum class Kind : std::uint8_t { whole_values, difference };
  Kind kind = Kind::whole_values;
  std::uint64_t body_bytes = 0;   // that follow
  std::uint64_t generation = 0;   // of the base; 0: there is none. The result is of the next one.
  std::uint64_t base_hash = 0;    // 0 if there is no base
  std::uint64_t result_hash = 0;  // of the values
};

inline constexpr std::size_t kDifferenceHeaderBytes = 64;

// `wire` has kDifferenceHeaderBytes.
void write_header(const DifferenceHeader& header, std::byte* wire);
// Throws Error if these bytes are no header of this version.
DifferenceHeader read_header(const std::byte* wire);

// Differences of bfloat16 and float16 values in host memory; threads as in codec.hpp. The hash of values finds memory
// that went astray, not an adversary: NH (Black et al., UMAC, CRYPTO 1999) with keys that everyone knows.
class [[gnu::visibility("default")]] DifferenceCodec {
 public:
  // `isa` as in make_cpu_codec.
  explicit DifferenceCodec(std::string_view isa = {});

  struct Encoded {
    std::size_t num_bytes;  // written
    std::uint64_t hash;     // of the values
  };
  // Writes the difference of `values` to `base`, of the same size and dtype, to `body`, which has
  // max_difference_bytes(), and the values to `base`.
  Encoded encode(ConstTensorView values, TensorView base, std::byte* body) const;

  // Adds a difference to `base`. Returns the hash of the result, which is not what was encoded if `base` was another
  // one. Throws Error, and `base` is undefined, if no encoder wrote these bytes for any base of this size; reads no
  // byte beyond them in any case.
  std::uint64_t decode(std::span<const std::byte> body, TensorView base) const;

  std::uint64_t hash(ConstTensorView values) const;

 private:
  const difference::Kernels* kernels_;
};

// --- In the memory of a device

// What a device finds wrong. It can throw nothing: it sets these bits in a status word, and makes all values NaN, so
// that no wrong one is used.
enum DifferenceError : std::uint32_t {
  kHeaderError = 1,      // no header of this version, or of another number of bytes
  kGenerationError = 2,  // the message belongs to another generation
  kBaseError = 4,        // the sender's base is not the one here
  kBodyError = 8,        // no encoder writes such a body for this number of values
  kResultError = 16,     // the result is not what the sender has: something has written to the base
  kKeptError = 32,       // values are no longer what they were
};

// Values are bfloat16 or float16. All pointers but those of the spans are to memory of the device; `num_bytes` and
// `status` may be host memory that the device can access. They are read and written when the stream gets there.
struct EncodeDifference {
  ConstTensorView values;
  TensorView base;               // of the same size and dtype, elsewhere; holds the values afterwards
  std::uint64_t generation = 0;  // of the base; 0: there is none, and the values are sent whole
  // A header and max_difference_bytes(), 16-byte aligned; the body follows the header. Null: nothing is sent.
  std::byte* message = nullptr;
  std::uint64_t* hash = nullptr;       // in: of the base, if there is one; out: of the values
  std::uint64_t* num_bytes = nullptr;  // out: of the message; null if there is none
};

struct DecodeDifference {
  const std::byte* message = nullptr;  // a header and a body as they arrived, 16-byte aligned
  std::size_t num_bytes = 0;           // that may be read
  TensorView base;                     // holds the sender's values afterwards
  std::uint64_t generation = 0;        // of the base; 0: there is none, and whole values are expected
  std::uint64_t* hash = nullptr;    // in: of the base, if there is one; out: of the values, unless something is wrong
  std::uint32_t* status = nullptr;  // gets bits of DifferenceError, and keeps those that it has; jobs may share one
};

// Whether `values` have this hash: kKeptError if not.
struct CheckHash {
  TensorView values;
  const std::uint64_t* hash = nullptr;
  std::uint32_t* status = nullptr;  // as of DecodeDifference
};

// The messages and hashes of DifferenceCodec, for the memory of the device that is current at each call. Calls check
// their arguments, then only queue kernels on `stream`: no synchronization; they can be captured in a graph. Jobs of a
// call share nothing that is written but a status word. Whatever bytes a message has, none beyond it is read.
class DeviceDifferences {
 public:
  virtual ~DeviceDifferences() = default;
  virtual void encode(std::span<const EncodeDifference> jobs, StreamView stream) const = 0;
  virtual void decode(std::span<const DecodeDifference> jobs, StreamView stream) const = 0;
  virtual void check(std::span<const CheckHash> jobs, StreamView stream) const = 0;
};

}  // namespace zcomm
