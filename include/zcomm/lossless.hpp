// Lossless differences of 16-bit floats, or of bytes in pairs, for weights that the receiver holds from the last step.
//
// In one optimizer step a weight changes by few units in the last place. The decoder can estimate how many, because it
// knows the exponent of the old value. docs/wire_format.md specifies the code; bench/zcomm_bench/lossless_reference.py
// executes it. Every bit pattern survives: NaN payloads, infinities, the sign of zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm {

namespace lossless {
struct Kernels;
}

// Values per tile; tiles are coded independently.
inline constexpr std::int64_t kLosslessTile = 2048;

// Returns the largest size of the difference of `num_elements` values in bytes, a multiple of 16: 2 bytes per value, 2
// per tile, and padding.
std::size_t max_lossless_bytes(std::int64_t num_elements);

// Header of a message: its size, and the base that it refers to.
struct LosslessHeader {
  bool is_difference = false;     // else whole values
  std::uint64_t body_bytes = 0;   // that follow
  std::uint64_t generation = 0;   // of the base, the result's is one more; 0: no base
  std::uint64_t base_hash = 0;    // 0 without a base
  std::uint64_t result_hash = 0;  // of the values
};

inline constexpr std::size_t kLosslessHeaderBytes = 64;

// Writes kLosslessHeaderBytes to `wire`.
void write_header(const LosslessHeader& header, std::byte* wire);
// Parses a header. Throws Error if these bytes are no header of this version.
LosslessHeader read_header(const std::byte* wire);

// Errors in what a job was given. They set these bits in a status word and make all values NaN, so that nobody uses
// wrong ones: a device cannot throw.
enum LosslessError : std::uint32_t {
  kHeaderError = 1,      // no header of this version, or of another number of bytes
  kGenerationError = 2,  // the message belongs to another generation
  kBaseError = 4,        // the sender's base differs from the one here
  kBodyError = 8,        // no encoder writes such a body for this number of values
  kResultError = 16,     // the result differs from the sender's: a stray write changed the base
  kSecondaryError = 32,  // values have changed since their hash was taken
};

// Returns what such values become. Two bytes of ones: a NaN in the formats of 8 bits that have one.
constexpr std::uint16_t nan_of(DType dtype) {
  return dtype == DType::bfloat16 ? 0x7fc0 : dtype == DType::float16 ? 0x7e00 : 0xffff;
}

// Encoding job for any dtype but float32. Pointers are to the codec's memory; on a GPU, `num_bytes` and `status`
// may be host memory that the device can access. All of it is read and written in stream order.
struct EncodeLossless {
  ConstTensorView values;
  TensorView base;               // same size and dtype, no overlap; holds the values afterwards
  std::uint64_t generation = 0;  // of the base; 0: no base, the values are sent whole
  // Receives a header and a body, 16-byte aligned: kLosslessHeaderBytes + max_lossless_bytes(). Null: no message.
  std::byte* message = nullptr;
  std::uint64_t* hash = nullptr;       // in: of the base, if any; out: of the values
  std::uint64_t* num_bytes = nullptr;  // out: of the message; null without one
};

struct DecodeLossless {
  const std::byte* message = nullptr;  // received header and body, 16-byte aligned
  std::size_t num_bytes = 0;           // readable bytes
  TensorView base;                     // holds the sender's values afterwards
  std::uint64_t generation = 0;        // of the base; 0: no base, whole values are expected
  std::uint64_t* hash = nullptr;       // in: of the base, if any; out: of the values, unless there is an error
  std::uint32_t* status = nullptr;     // receives bits of LosslessError in addition to earlier ones; jobs may share it
};

// Compares the hash of `values` with `hash`. If they differ, `status` gets kSecondaryError, and `spoiled` becomes NaN:
// the values themselves, or data computed from them. Without `status`, takes the hash of `values` instead.
struct CheckHash {
  ConstTensorView values;
  TensorView spoiled = {};
  std::uint64_t* hash = nullptr;    // in; out without `status`
  std::uint32_t* status = nullptr;  // as in DecodeLossless
};

// Numbers that jobs read and write, for longer than a call: here in host memory. On a GPU they belong to the device
// that was current when they were made, and an event marks their last use.
class JobMemory {
 public:
  JobMemory(std::size_t num_bytes, std::size_t num_shared_bytes)
      : memory_((num_bytes + num_shared_bytes) / sizeof(memory_[0]) + 2),
        data_(reinterpret_cast<std::byte*>(memory_.data())),
        shared_(data_ + (num_bytes + sizeof(memory_[0]) - 1) / sizeof(memory_[0]) * sizeof(memory_[0])) {}
  virtual ~JobMemory() = default;
  JobMemory(const JobMemory&) = delete;
  JobMemory& operator=(const JobMemory&) = delete;

  std::byte* data() const { return data_; }      // which jobs alone access
  std::byte* shared() const { return shared_; }  // which the host accesses, too; zeros initially

  // Takes the work that is on `stream` now for the last use; makes a stream wait for it; blocks the host until it is
  // over; tells whether it is over.
  virtual void mark_use(StreamView) {}
  virtual void make_wait(StreamView) const {}
  virtual void wait() const {}
  virtual bool is_over() const { return true; }
  // Tells whether jobs are done when their call returns.
  virtual bool is_at_once() const { return true; }

 protected:
  // Takes memory of the derived class.
  JobMemory(std::byte* data, std::byte* shared) : data_(data), shared_(shared) {}

 private:
  std::vector<std::uint64_t> memory_;
  std::byte* data_;
  std::byte* shared_;
};

// Codec of differences, with headers and hashes, for one kind of memory. As in Codec, a call takes independent jobs;
// it returns when the work is done on a CPU, and when it is queued on `stream` on a GPU, without synchronization.
// Throws ArgumentError on an invalid job, before any begins. Jobs of a call may share only a status word for writing.
// No byte beyond a message is read, whatever it contains.
class [[gnu::visibility("default")]] LosslessCodec {
 public:
  virtual ~LosslessCodec() = default;
  virtual void encode(std::span<const EncodeLossless> jobs, StreamView stream) const = 0;
  virtual void decode(std::span<const DecodeLossless> jobs, StreamView stream) const = 0;
  virtual void check(std::span<const CheckHash> jobs, StreamView stream) const = 0;
  // Makes memory of these sizes, see JobMemory::data() and shared().
  virtual std::unique_ptr<JobMemory> make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const = 0;
};

// Codec for host memory; threads as in codec.hpp. The hash detects stray writes, not an adversary: NH (Black et al.,
// UMAC, CRYPTO 1999) with public keys.
class [[gnu::visibility("default")]] HostLosslessCodec final : public LosslessCodec {
 public:
  // Selects kernels by `isa`, as make_cpu_codec does.
  explicit HostLosslessCodec(std::string_view isa = {});

  void encode(std::span<const EncodeLossless> jobs, StreamView stream) const override;
  void decode(std::span<const DecodeLossless> jobs, StreamView stream) const override;
  void check(std::span<const CheckHash> jobs, StreamView stream) const override;
  std::unique_ptr<JobMemory> make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const override;

  // --- Bodies alone

  // Encodes the difference of `values` to `base`, of the same size and dtype, into `body`, which has
  // max_lossless_bytes(). Copies the values to `base`. Returns the bytes written, and the hash of the values.
  std::pair<std::size_t, std::uint64_t> encode(ConstTensorView values, TensorView base, std::byte* body) const;

  // Adds a difference to `base`. Returns the hash of the result; it differs from the encoder's if the base does. Throws
  // Error, and leaves `base` undefined, if no encoder wrote these bytes for a base of this size. Never reads beyond
  // them.
  std::uint64_t decode(std::span<const std::byte> body, TensorView base) const;

  std::uint64_t hash(ConstTensorView values) const;

 private:
  // Copies values to both places that are not null. Returns their hash.
  std::uint64_t copy(ConstTensorView values, std::byte* first, std::byte* second) const;
  // Updates a job's base. Returns bits of LosslessError.
  std::uint32_t update(const DecodeLossless& job) const;

  const lossless::Kernels* kernels_;
};

}  // namespace zcomm
