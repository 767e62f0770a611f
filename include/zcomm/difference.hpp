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

// What goes ahead of a message, so that its size is known, and what it may be added to.
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

}  // namespace zcomm
