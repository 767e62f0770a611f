// Lossless differences of 16-bit floats, or of byte pairs, for weights that the receiver holds from the last step.
//
// In one optimizer step a weight changes by few units in the last place. The decoder can estimate how many, because it
// knows the exponent of the old value. Every bit pattern survives: NaN payloads, infinities, the sign of zero.
//
// docs/wire_format.md specifies the code, and bench/zcomm_bench/lossless_reference.py executes it. Most callers use
// make_lossless_gather(), which calls the codec.
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

// Values per tile. Tiles are coded independently.
inline constexpr std::int64_t kLosslessTile = 2048;

// Returns the largest size in bytes of the difference of `num_elements` values, a multiple of 16.
// It has 2 bytes per value, 2 per tile, and padding.
std::size_t max_lossless_bytes(std::int64_t num_elements);

// Header of a message: its size, and the base that it refers to. The base is the values that the receiver holds.
struct LosslessHeader {
  bool is_difference = false;     // false: the body has whole values
  std::uint64_t body_bytes = 0;   // bytes that follow the header
  std::uint64_t generation = 0;   // of the base; the result has one more; 0: no base
  std::uint64_t base_hash = 0;    // 0 without a base
  std::uint64_t result_hash = 0;  // of the values
};

// Bytes of a header in a message.
inline constexpr std::size_t kLosslessHeaderBytes = 64;

// Writes kLosslessHeaderBytes bytes to `wire`, in host memory. It needs no alignment.
void write_header(const LosslessHeader& header, std::byte* wire);

// Parses kLosslessHeaderBytes bytes of host memory. Throws Error if they are no header of this version.
LosslessHeader read_header(const std::byte* wire);

// Errors that a job finds in its input, as bits of a status word.
// A device cannot throw, so a job also sets all values to NaN, and wrong values cannot be used unnoticed.
enum LosslessError : std::uint32_t {
  kHeaderError = 1,      // the header is not of this version, or announces another number of bytes
  kGenerationError = 2,  // the message belongs to another generation
  kBaseError = 4,        // the sender's base differs from the one here
  kBodyError = 8,        // no encoder writes such a body for this number of values
  kResultError = 16,     // the result differs from the sender's: a stray write changed the base
  kSecondaryError = 32,  // values have changed since their hash was taken
};

// Returns the bits that values get after an error: a NaN.
// Byte pairs get two bytes of ones, a NaN in the 8-bit formats that have one.
constexpr std::uint16_t nan_of(DType dtype) {
  return dtype == DType::bfloat16 ? 0x7fc0 : dtype == DType::float16 ? 0x7e00 : 0xffff;
}

// Job that encodes values of any dtype but float32, and stores them in the base.
//
// Pointers are to the codec's memory. On a GPU, `num_bytes` may also be host memory that the device can access.
// All memory is read and written in stream order.
struct EncodeLossless {
  ConstTensorView values;
  TensorView base;               // same size and dtype, no overlap; holds the values afterwards
  std::uint64_t generation = 0;  // of the base; 0: no base, the values are sent whole
  // Receives a header and a body. It has room for kLosslessHeaderBytes + max_lossless_bytes() bytes, and is aligned to
  // 16 bytes. Null: no message is written.
  std::byte* message = nullptr;
  std::uint64_t* hash = nullptr;       // in: of the base, if any; out: of the values; not null
  std::uint64_t* num_bytes = nullptr;  // out: bytes of the message; null exactly if there is no message
};

// Job that decodes a message into the base. On a GPU, `status` may be host memory that the device can access.
struct DecodeLossless {
  const std::byte* message = nullptr;  // received header and body, aligned to 16 bytes
  std::size_t num_bytes = 0;           // readable bytes of the message
  TensorView base;                     // holds the sender's values afterwards, NaN after an error
  std::uint64_t generation = 0;        // of the base; 0: no base, whole values are expected
  std::uint64_t* hash = nullptr;       // in: of the base, if any; out: of the values, unless there is an error
  std::uint32_t* status = nullptr;     // gets bits of LosslessError in addition to earlier ones; jobs may share it
};

// Job that compares the hash of `values` with `*hash`.
// If they differ, it sets kSecondaryError in `*status` and NaN in `spoiled`.
// Without `status` it stores the hash of `values` in `*hash` instead.
struct CheckHash {
  ConstTensorView values;           // any dtype but float32
  TensorView spoiled = {};          // the values themselves, or data computed from them; same dtype
  std::uint64_t* hash = nullptr;    // in; out without `status`; not null
  std::uint32_t* status = nullptr;  // as in DecodeLossless, or null
};

// Numbers that jobs read and write beyond a call, such as hashes and status words.
//
// This class has them in host memory, where jobs are done when their call returns. On a GPU they belong to the device
// that was current when they were made, and an event marks their last use.
class JobMemory {
 public:
  // Allocates `num_bytes` bytes for data() and `num_shared_bytes` for shared(). All are zeros.
  JobMemory(std::size_t num_bytes, std::size_t num_shared_bytes)
      : memory_((num_bytes + num_shared_bytes) / sizeof(memory_[0]) + 2),
        data_(reinterpret_cast<std::byte*>(memory_.data())),
        shared_(data_ + (num_bytes + sizeof(memory_[0]) - 1) / sizeof(memory_[0]) * sizeof(memory_[0])) {}
  virtual ~JobMemory() = default;
  JobMemory(const JobMemory&) = delete;
  JobMemory& operator=(const JobMemory&) = delete;

  // Returns memory that only jobs access.
  std::byte* data() const { return data_; }

  // Returns memory that the host may access, too. It is zero initially.
  std::byte* shared() const { return shared_; }

  // Records the work that is queued on `stream` now as the last use.
  virtual void mark_use(StreamView) {}

  // Makes `stream` wait for the last use. Does not block the host.
  virtual void make_wait(StreamView) const {}

  // Blocks the host until the last use has completed.
  virtual void wait() const {}

  // Returns true if the last use has completed, or if there was none. Does not block the host.
  virtual bool is_over() const { return true; }

  // Returns true if jobs are done when their call returns, as on a CPU.
  virtual bool is_at_once() const { return true; }

 protected:
  // Takes memory that the derived class owns.
  JobMemory(std::byte* data, std::byte* shared) : data_(data), shared_(shared) {}

 private:
  std::vector<std::uint64_t> memory_;
  std::byte* data_;
  std::byte* shared_;
};

// Codec of differences, with headers and hashes, for one kind of memory.
//
// As in Codec, a call takes independent jobs. It returns when the work is done on a CPU, and when the work is queued on
// `stream` on a GPU, without synchronization. The jobs are read before the call returns.
// A call throws ArgumentError on an invalid job, before any job begins.
// Jobs of a call must not write to the same memory, except for a status word.
// No byte beyond a message is read, whatever the message contains.
class [[gnu::visibility("default")]] LosslessCodec {
 public:
  virtual ~LosslessCodec() = default;

  // Encodes values into messages and bases.
  virtual void encode(std::span<const EncodeLossless> jobs, StreamView stream) const = 0;

  // Decodes messages into bases. Errors in a message set a status word; they are not thrown.
  virtual void decode(std::span<const DecodeLossless> jobs, StreamView stream) const = 0;

  // Compares or stores hashes of values.
  virtual void check(std::span<const CheckHash> jobs, StreamView stream) const = 0;

  // Makes memory of these sizes in bytes for jobs: see JobMemory::data() and JobMemory::shared().
  virtual std::unique_ptr<JobMemory> make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const = 0;
};

// Codec of differences for host memory. It shares the threads of set_num_threads().
//
// The hash is NH (Black et al., UMAC, CRYPTO 1999) with public keys. It detects stray writes, not an adversary.
class [[gnu::visibility("default")]] HostLosslessCodec final : public LosslessCodec {
 public:
  // Selects kernels by `isa`, which has the values and the errors of make_cpu_codec().
  explicit HostLosslessCodec(std::string_view isa = {});

  void encode(std::span<const EncodeLossless> jobs, StreamView stream) const override;
  void decode(std::span<const DecodeLossless> jobs, StreamView stream) const override;
  void check(std::span<const CheckHash> jobs, StreamView stream) const override;
  std::unique_ptr<JobMemory> make_memory(std::size_t num_bytes, std::size_t num_shared_bytes) const override;

  // --- Bodies without headers

  // Encodes the difference of `values` to `base`, and copies the values to `base`.
  // `values` and `base` have the same size and dtype. `body` has room for max_lossless_bytes() bytes, and is aligned to
  // 16 bytes.
  // Returns the bytes written, and the hash of the values. Throws ArgumentError on a mismatch or a misaligned address.
  std::pair<std::size_t, std::uint64_t> encode(ConstTensorView values, TensorView base, std::byte* body) const;

  // Adds a difference to `base`. Returns the hash of the result, which differs from the encoder's if the base does.
  // Throws Error and leaves `base` undefined if no encoder writes these bytes for a base of this size.
  // Never reads beyond `body`.
  std::uint64_t decode(std::span<const std::byte> body, TensorView base) const;

  // Returns the hash of values of any dtype but float32. Throws ArgumentError on float32.
  std::uint64_t hash(ConstTensorView values) const;

 private:
  // Copies values to both places that are not null. Returns their hash.
  std::uint64_t copy(ConstTensorView values, std::byte* first, std::byte* second) const;
  // Updates a job's base. Returns bits of LosslessError.
  std::uint32_t update(const DecodeLossless& job) const;

  const lossless::Kernels* kernels_;
};

}  // namespace zcomm
