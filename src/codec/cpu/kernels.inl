// Loops of the host codec. Included once per instruction set, by a file that defines ZCOMM_ISA, its name, and
// ZCOMM_KERNELS, the name of its table. kernels.hpp says why nothing here may have external linkage or come from a
// header.
//
// Most loops are plain and carry `omp simd`. Hot loops of large tensors first run through groups of registers: see
// lanes.inl.
#include <utility>

#include "codec/cpu/kernels.hpp"
#ifdef __SSE2__
#include <immintrin.h>  // compiler built-ins that are always inlined
#elif defined(ZCOMM_NEON)
#include <arm_neon.h>
#endif

namespace zcomm::cpu {
namespace {

#include "codec/cpu/convert.inl"

constexpr float kMinScale = 0x1p-126f;
constexpr float kLargestFinite = 0x1.fffffep127f;
constexpr float kRoundToInteger = 0x1.8p23f;  // low bits of x + this: round_to_nearest_even(x), |x| <= 2^22

// Prefetch distance in bytes, for decoding and for an encode's search for the largest magnitude.
constexpr std::int64_t kPrefetchBytes = 2048;
constexpr std::int64_t kEncodeAhead = 3072;

// Prefetches past the page a tile ends on, where the hardware prefetcher stops. Targets the L2 cache: an L1 cache has
// too few buffers for lines from memory. Does nothing past the end of a buffer. The address is an integer, because a
// pointer may not be moved past the end.
ZCOMM_INLINE void prefetch(const void* data, std::int64_t offset, std::int64_t num_bytes) {
  constexpr int kIntoL2 = 2;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(offset);
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < num_bytes; i += 64) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing is read through it
    __builtin_prefetch(reinterpret_cast<const void*>(begin + static_cast<std::uintptr_t>(i)), 0, kIntoL2);
  }
}

#include "codec/cpu/codes.inl"
#include "codec/cpu/encode.inl"

// Stores round(terms * factor), NaNs canonical. kStream: past the caches, to an address that is aligned to 64.
template <class Type, bool kStream>
void store_values(const float* terms, std::int64_t count, float factor, std::byte* value_bytes) {
  typename Type::Bits* values = reinterpret_cast<typename Type::Bits*>(value_bytes);
  std::int64_t done = 0;
#ifdef ZCOMM_LANES
  const Floats factors = broadcast(factor);
  for (; done + kGroup <= count; done += kGroup) {
    Group group;
    for (int i = 0; i < kGroupRegisters; ++i) {
      group[i] = canonical_nan(load(terms + done + i * ZCOMM_LANES) * factors);
    }
    store_group<Type, kStream>(group, values + done);
  }
#endif
#pragma omp simd
  for (std::int64_t i = done; i < count; ++i) {
    values[i] = static_cast<typename Type::Bits>(Type::narrow(terms[i] * factor));
  }
}

template <class Type>
void store_values(const float* terms, std::int64_t count, float factor, std::byte* values, bool stream) {
  if (stream) return store_values<Type, true>(terms, count, factor, values);
  store_values<Type, false>(terms, count, factor, values);
}

#include "codec/cpu/decode.inl"
#include "codec/cpu/sum.inl"

void saturate(float* terms, std::int64_t count, float limit) {
  const std::uint32_t limit_bits = bits_of(limit);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(terms[i]);
    const std::uint32_t magnitude = bits & kAbs32;
    const bool beyond = magnitude > limit_bits && magnitude < kInfinity32;
    terms[i] = float_of(beyond ? (bits & ~kAbs32) | limit_bits : bits);
  }
}

void stream(const std::byte* source, std::int64_t num_bytes, std::byte* destination) {
  std::int64_t done = 0;
#ifdef __SSE2__
  done = min_of(static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(destination) % 64), num_bytes);
  __builtin_memcpy(destination, source, static_cast<std::size_t>(done));
  for (; done + 64 <= num_bytes; done += 64) {  // whole lines: partial writes are slow
    for (std::int64_t i = done; i < done + 64; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(destination + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    }
  }
#endif
  __builtin_memcpy(destination + done, source + done, static_cast<std::size_t>(num_bytes - done));
}

void end_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

#undef ZCOMM_INLINE
#undef ZCOMM_LANES
#undef ZCOMM_SHUFFLES_BYTES

}  // namespace

extern const Kernels ZCOMM_KERNELS;
const Kernels ZCOMM_KERNELS = {
    .isa = ZCOMM_ISA,
    .load_values = {load_values<Float32, false>, load_values<Bfloat16, false>, load_values<Float16, false>},
    .add_values = {load_values<Float32, true>, load_values<Bfloat16, true>, load_values<Float16, true>},
    .decode = {decode<Float32>, decode<Bfloat16>, decode<Float16>},
    .sum_codes = add_codes<false>,
    .add_codes = add_codes<true>,
    .sum_values = {sum_values<Float32>, sum_values<Bfloat16>, sum_values<Float16>},
    .saturate = saturate,
    .store_values = {store_values<Float32>, store_values<Bfloat16>, store_values<Float16>},
    .rotate_back = rotate_back,
    .stream = stream,
    .end_stream = end_stream,
    .encode = {encode<Float32>, encode<Bfloat16>, encode<Float16>},
    .encode_tile = {encode_tile<Float32>, encode_tile<Bfloat16>, encode_tile<Float16>},
};

}  // namespace zcomm::cpu
