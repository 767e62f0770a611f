// The loops of the host codec. Included once per instruction set, by a file that defines ZCOMM_KERNELS, the name of its
// table. See kernels.hpp for why nothing here may have external linkage or come from a header.
//
// Most loops are plain and carry `omp simd`. A few have intrinsics as well, where those were much faster.
#include "codec/cpu/kernels.hpp"
#ifdef __SSE2__
#include <immintrin.h>  // compiler built-ins that are always inlined
#endif

namespace zcomm::cpu {
namespace {

#include "codec/cpu/convert.inl"

constexpr float kMinScale = 0x1p-126f;
constexpr float kMaxScale = 0x1.fep127f;
constexpr float kLargestFinite = 0x1.fffffep127f;
constexpr float kRoundToInteger = 0x1.8p23f;  // x + this has round_to_nearest_even(x) in its low bits, |x| <= 2^22

// The hardware does not look ahead across the pages that a tile ends on. Past the end of a buffer this does nothing.
ZCOMM_INLINE void prefetch(const void* data, std::int64_t offset, std::int64_t num_bytes) {
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(offset);
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < num_bytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + static_cast<std::uintptr_t>(i)));
  }
}

#include "codec/cpu/codes.inl"
#include "codec/cpu/encode.inl"

// --- Decode

// The blocks that can leave +-limit, and those that are NaN: rare, so apart from the fast loops.
template <class Type>
__attribute__((noinline)) void dequantize_special(const std::int8_t* codes, std::int64_t count, float scale,
                                                  float limit, typename Type::Bits* values) {
  for (std::int64_t i = 0; i < count; ++i) {
    float term = static_cast<float>(codes[i]) * scale;
    term = term > limit ? limit : term;
    term = term < -limit ? -limit : term;
    values[i] = Type::narrow(scale != scale ? float_of(kNan32) : term);
  }
}

ZCOMM_INLINE void dequantize(const std::int8_t* codes, std::int64_t count, float scale, Word32* values) {
  std::int64_t done = 0;
#ifdef ZCOMM_LANES
  const Floats scales = broadcast(scale);
  for (; done + ZCOMM_LANES <= count; done += ZCOMM_LANES) {
    store(reinterpret_cast<float*>(values + done), load_codes(codes + done) * scales);
  }
#endif
#pragma omp simd
  for (std::int64_t i = done; i < count; ++i) values[i] = bits_of(static_cast<float>(codes[i]) * scale);
}

// In pairs, as in quantize.
ZCOMM_INLINE void dequantize(const std::int8_t* codes, std::int64_t count, float scale, Word16* values) {
  const Word16* code_pairs = reinterpret_cast<const Word16*>(codes);
  WordPair* value_pairs = reinterpret_cast<WordPair*>(values);
#pragma omp simd
  for (std::int64_t i = 0; i < count / 2; ++i) {
    const auto shifted = static_cast<std::int32_t>(static_cast<std::uint32_t>(code_pairs[i]) << 16);
    const float first = static_cast<float>((shifted << 8) >> 24) * scale;
    const float second = static_cast<float>(shifted >> 24) * scale;
    value_pairs[i] = (Bfloat16::round(first) >> 16) | (Bfloat16::round(second) & 0xffff0000u);
  }
  if (count % 2 != 0) values[count - 1] = Bfloat16::narrow_finite(static_cast<float>(codes[count - 1]) * scale);
}

ZCOMM_INLINE float scale_of(Word16 bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

ZCOMM_INLINE float scale_of(Word16 bits, float factor) {
  if (factor == 1.0f) return scale_of(bits);
  float scale = scale_of(bits) * factor;
  scale = scale > kLargestFinite ? kLargestFinite : scale;
  return scale < -kLargestFinite ? -kLargestFinite : scale;
}

// Codes, one per byte, and scales of up to a tile of a wire, from element `begin` on. `room`: a tile.
struct Tile {
  ZCOMM_INLINE Tile of(const CodedBlocks& wire, std::int64_t begin, std::int64_t count, std::int8_t* room) {
    const std::byte* packed = wire.codes + packed_bytes(wire.kind, begin);
    const std::int64_t num_bytes = packed_bytes(wire.kind, count);
    prefetch(packed, num_bytes, num_bytes);
    return {unpack(wire.kind, packed, count, room),
            reinterpret_cast<const Word16*>(wire.scales) + begin / wire.block_size};
  }

  const std::int8_t* codes;
  const Word16* scales;
};

// Calls run(scale, i, count) for the part of each block that lies in a tile, elements i and up of it.
template <class Run>
ZCOMM_INLINE void for_blocks(const CodedBlocks& wire, const Word16* scales, std::int64_t begin, std::int64_t count,
                             const Run& run) {
  const std::int64_t block_size = wire.block_size;  // copies: what is written may be anything, to a compiler
  const float factor = wire.factor;
  std::int64_t block_end = min_of(block_size - begin % block_size, count);
  for (std::int64_t i = 0; i < count; i = block_end, block_end = min_of(i + block_size, count)) {
    run(scale_of(*scales++, factor), i, block_end - i);
  }
}

template <class Type>
__attribute__((noinline)) void decode_fp8(const CodedBlocks& wire, std::int64_t begin, std::int64_t count, float limit,
                                          typename Type::Bits* values) {
  alignas(64) float terms[kTileElements];
  const Tile tile = Tile::of(wire, begin, count, nullptr);
  from_e4m3(tile.codes, count, terms);
  for_blocks(wire, tile.scales, begin, count, [&](float scale, std::int64_t first, std::int64_t block_count) {
#pragma omp simd
    for (std::int64_t i = first; i < first + block_count; ++i) {
      float term = terms[i] * scale;
      term = term > limit ? limit : term;
      term = term < -limit ? -limit : term;
      values[i] = Type::narrow(scale != scale ? float_of(kNan32) : term);
    }
  });
}

template <class Type>
ZCOMM_INLINE void decode_codes(const CodedBlocks& wire, const Tile& tile, std::int64_t begin, std::int64_t count,
                               float limit, typename Type::Bits* values) {
  const float max_code = wire.max_code;
  for_blocks(wire, tile.scales, begin, count, [=](float scale, std::int64_t i, std::int64_t block_count) {
    if (__builtin_fabsf(scale) * max_code <= limit) {
      dequantize(tile.codes + i, block_count, scale, values + i);
    } else {
      dequantize_special<Type>(tile.codes + i, block_count, scale, limit, values + i);
    }
  });
}

// Apart from decode: with this room on its stack int8 was a fifth slower.
template <class Type>
__attribute__((noinline)) void decode_packed(const CodedBlocks& wire, std::int64_t begin, std::int64_t count,
                                             float limit, typename Type::Bits* values) {
  alignas(64) std::int8_t room[kTileElements];
  decode_codes<Type>(wire, Tile::of(wire, begin, count, room), begin, count, limit, values);
}

template <class Type>
void decode(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit, std::byte* value_bytes) {
  typename Type::Bits* values = reinterpret_cast<typename Type::Bits*>(value_bytes);
  if (wire.kind == CodeKind::fp8) return decode_fp8<Type>(wire, begin, count, limit, values);
  if (wire.kind != CodeKind::int8) return decode_packed<Type>(wire, begin, count, limit, values);
  decode_codes<Type>(wire, Tile::of(wire, begin, count, nullptr), begin, count, limit, values);
}

void decode_float16(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit, std::byte* values) {
  alignas(64) float terms[kTileElements];
  decode<Float32>(wire, begin, count, limit, reinterpret_cast<std::byte*>(terms));
  Float16::narrow_row(terms, count, 1.0f, reinterpret_cast<Word16*>(values));
}

// --- Sums

template <class Type, bool kAdd>
void load_values(const std::byte* value_bytes, std::int64_t count, float* terms) {
  const typename Type::Bits* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float term = float_of(Type::widen(values[i]));
    terms[i] = kAdd ? terms[i] + term : term;
  }
}

void load_float16(const std::byte* values, std::int64_t count, float* terms) {
  widen_row<Float16>(reinterpret_cast<const Word16*>(values), count, terms);
}

void add_float16(const std::byte* values, std::int64_t count, float* terms) {
  alignas(64) float widened[kTileElements];
  load_float16(values, count, widened);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) terms[i] += widened[i];
}

// kWires at once, so that terms are loaded and stored once for all of them. A product of code and scale is exact: it
// does not matter whether it is fused with the addition.
template <int kWires>
void add_wires(const CodedBlocks* wires, std::int64_t begin, std::int64_t count, float limit, float* terms) {
  alignas(64) std::int8_t room[kWires][kTileElements];
  Tile tiles[kWires];
  for (int w = 0; w < kWires; ++w) tiles[w] = Tile::of(wires[w], begin, count, room[w]);
  const std::int64_t block_size = wires[0].block_size;
  std::int64_t block_end = min_of(block_size - begin % block_size, count);
  for (std::int64_t i = 0; i < count; i = block_end, block_end = min_of(i + block_size, count)) {
    float scale[kWires];
    bool special = false;
    for (int w = 0; w < kWires; ++w) {
      scale[w] = scale_of(*tiles[w].scales++);
      special |= !(scale[w] * wires[0].max_code <= limit);
    }
    if (special) {
      for (int w = 0; w < kWires; ++w) {
        Word32 bits[kTileElements];
        dequantize_special<Float32>(tiles[w].codes + i, block_end - i, scale[w], limit, bits);
        for (std::int64_t k = i; k < block_end; ++k) terms[k] += float_of(bits[k - i]);
      }
      continue;
    }
    std::int64_t done = i;
#ifdef ZCOMM_LANES
    for (; done + ZCOMM_LANES <= block_end; done += ZCOMM_LANES) {
      Floats term = load(terms + done);
      for (int w = 0; w < kWires; ++w)
        term = multiply_add(load_codes(tiles[w].codes + done), broadcast(scale[w]), term);
      store(terms + done, term);
    }
#endif
    for (int w = 0; w < kWires; ++w) {
#pragma omp simd
      for (std::int64_t k = done; k < block_end; ++k) terms[k] += static_cast<float>(tiles[w].codes[k]) * scale[w];
    }
  }
}

void add_codes(const CodedBlocks* wires, int num_wires, std::int64_t begin, std::int64_t count, float limit,
               float* terms) {
  static_assert(kMaxWires == 4);
  constexpr decltype(&add_wires<1>) kAdd[] = {add_wires<1>, add_wires<2>, add_wires<3>, add_wires<4>};
  kAdd[num_wires - 1](wires, begin, count, limit, terms);
}

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

template <class Type>
void store_values(const float* terms, std::int64_t count, float factor, std::byte* value_bytes) {
  typename Type::Bits* values = reinterpret_cast<typename Type::Bits*>(value_bytes);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) values[i] = Type::narrow(terms[i] * factor);
}

void store_float16(const float* terms, std::int64_t count, float factor, std::byte* values) {
  Float16::narrow_row(terms, count, factor, reinterpret_cast<Word16*>(values));
}

void stream(const std::byte* source, std::int64_t num_bytes, std::byte* destination) {
  std::int64_t done = 0;
#ifdef __SSE2__
  done = min_of(static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(destination) % 64), num_bytes);
  __builtin_memcpy(destination, source, static_cast<std::size_t>(done));
  for (; done + 64 <= num_bytes; done += 64) {  // whole lines: partly written ones are slow
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

}  // namespace

extern const Kernels ZCOMM_KERNELS;
const Kernels ZCOMM_KERNELS = {
    .load_values = {load_values<Float32, false>, load_values<Bfloat16, false>, load_float16},
    .add_values = {load_values<Float32, true>, load_values<Bfloat16, true>, add_float16},
    .decode = {decode<Float32>, decode<Bfloat16>, decode_float16},
    .add_codes = add_codes,
    .saturate = saturate,
    .store_values = {store_values<Float32>, store_values<Bfloat16>, store_float16},
    .rotate_back = rotate_back,
    .stream = stream,
    .end_stream = end_stream,
    .encode = {encode<Float32>, encode<Bfloat16>, encode_float16},
    .encode_tile = {encode_tile<Float32>, encode_tile<Bfloat16>, encode_tile<Float16>},
};

}  // namespace zcomm::cpu
