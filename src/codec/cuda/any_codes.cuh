// Generic kernels for codes of every kind, with any rounding: one each to encode, decode and sum. int8 and int4,
// rounded to nearest, have separate kernels with the types of codes.cuh.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/eden.cuh"
#include "codec/cuda/rotate.cuh"

namespace zcomm::gpu {

// --- Between codes and words

template <std::uint32_t kBits>
ZCOMM_DEVICE void pack_bits(const std::uint32_t (&codes)[kGroup], CodeWords& words) {
#pragma unroll
  for (std::uint32_t i = 0; i < kGroup; ++i) {
    const std::uint32_t code = codes[i] & ((1u << kBits) - 1), word = i * kBits / 32, shift = i * kBits % 32;
    words[word] |= code << shift;
    if (shift + kBits > 32) words[word + 1] |= code >> (32 - shift);
  }
}

ZCOMM_DEVICE void pack_any(ElementKind kind, const std::uint32_t (&codes)[kGroup], CodeWords& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  switch (kind) {
    case ElementKind::exact:
    case ElementKind::bf16:
      return;  // which have no codes
    case ElementKind::int8:
    case ElementKind::fp8:
      return pack_bits<8>(codes, words);
    case ElementKind::int4:
    case ElementKind::eden4:
      return pack_bits<4>(codes, words);
    case ElementKind::eden3:
      return pack_bits<3>(codes, words);
    case ElementKind::eden2:
      return pack_bits<2>(codes, words);
  }
}

// Bits that a thread stores at once: a group's codes are whole words, or halves of words if they have 3 bits.
ZCOMM_DEVICE std::uint32_t unit_of(std::uint32_t bits) { return bits == 3 ? 16 : 32; }

// Stores `num_bits` of a group's words, rounded up to a unit.
ZCOMM_DEVICE void store_any(const CodeWords& words, std::uint32_t bits, std::uint32_t num_bits, std::byte* codes) {
  if (unit_of(bits) == 16) {
    std::uint16_t* const halves = reinterpret_cast<std::uint16_t*>(codes);
#pragma unroll
    for (std::uint32_t i = 0; i < 3; ++i) {
      if (i * 16 < num_bits) halves[i] = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
    return;
  }
  std::uint32_t* const data = reinterpret_cast<std::uint32_t*>(codes);
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    if (i * 32 < num_bits) data[i] = words[i];
  }
}

// Unpacks a group's words as a queue that gives out one code after the other: one loop for all numbers of bits.
ZCOMM_DEVICE void unpack_any(ElementKind kind, std::uint32_t bits, CodeWords& words, float (&codes)[kGroup]) {
  const std::uint32_t mask = (1u << bits) - 1, sign = kind == ElementKind::fp8 ? 0 : 1u << (bits - 1);
  if (is_eden(kind)) return unpack_eden(bits, words, codes);
  std::uint32_t patterns[kGroup];
#pragma unroll
  for (std::uint32_t i = 0; i < kGroup; ++i) {
    patterns[i] = (words[0] & mask) ^ sign;
#pragma unroll
    for (int k = 0; k < 3; ++k) words[k] = __funnelshift_r(words[k], words[k + 1], bits);
    words[3] >>= bits;
  }
  if (kind == ElementKind::fp8) {
#pragma unroll
    for (std::uint32_t i = 0; i < kGroup; ++i) {
      const std::uint32_t pattern = patterns[i];
      codes[i] = __fmul_rn(__uint_as_float((pattern & 0x80u) << 24 | (pattern & 0x7fu) << 20), 0x1p120f);
    }
  } else {
    const float bias = __fadd_rn(0x1p23f, static_cast<float>(sign));
#pragma unroll
    for (std::uint32_t i = 0; i < kGroup; ++i) {
      codes[i] = __fadd_rn(__uint_as_float(0x4b000000u | patterns[i]), -bias);
    }
  }
}

// Loads the code words of the group that begins with element `begin`, zeros past them.
ZCOMM_DEVICE void load_codes(const std::byte* codes, std::uint32_t bits, std::uint32_t begin,
                             std::uint32_t num_elements, CodeWords& words) {
  const std::uint32_t num_bits = begin < num_elements ? smaller_of(num_elements - begin, kGroup) * bits : 0;
  if (unit_of(bits) == 16) {
    const std::uint16_t* const halves = reinterpret_cast<const std::uint16_t*>(codes + begin / 8 * bits);
    const std::uint32_t first = 0 < num_bits ? halves[0] : 0u, second = 16 < num_bits ? halves[1] : 0u;
    words[0] = first | second << 16;
    words[1] = 32 < num_bits ? halves[2] : 0u;
    words[2] = words[3] = 0;
    return;
  }
  const std::uint32_t* data = reinterpret_cast<const std::uint32_t*>(codes + begin / 8 * bits);
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) words[i] = i * 32 < num_bits ? data[i] : 0;
}

// --- Terms

// Computes the terms of the group that begins with element `begin`: codes times scale times the wire's factor, each
// kept within +-kLargestFinite. The wire lies `offset` bytes further on.
ZCOMM_DEVICE void load_terms(const WirePart& wire, std::uint64_t offset, std::uint32_t begin,
                             std::uint32_t num_elements, float (&terms)[kGroup]) {
  constexpr float kLimit = Float32::kLargestFinite;
  CodeWords words;
  load_codes(wire.data + offset, wire.bits, begin, num_elements, words);
  unpack_any(wire.kind, wire.bits, words, terms);
  float scale = begin < num_elements ? scale_value(load_scale(wire.scale(begin / kGroup) + offset)) : 0.0f;
  scale = clamp(__fmul_rn(scale, wire.factor), kLimit);
  const bool is_zero = wire.nan_is_zero && scale != scale;
#pragma unroll
  for (int i = 0; i < 16; ++i) terms[i] = is_zero ? 0.0f : clamp(__fmul_rn(terms[i], scale), kLimit);
}

// --- Random bits: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11)

// Returns the 16 random bits of each of 16 elements, two in a word, the first in its low half. `element` is the index
// of the first one, a multiple of 16.
ZCOMM_DEVICE void random_bits(std::uint64_t seed, std::uint64_t element, std::uint32_t (&bits)[kGroup / 2]) {
#pragma unroll
  for (int call = 0; call < 2; ++call) {
    const std::uint64_t counter = element / 8 + static_cast<std::uint64_t>(call);
    std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
    std::uint32_t c2 = 0, c3 = 0;
    std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const std::uint32_t high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
      const std::uint32_t high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
      c0 = high1 ^ c1 ^ key0, c1 = low1;
      c2 = high0 ^ c3 ^ key1, c3 = low0;
      key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
    }
    bits[4 * call] = c0, bits[4 * call + 1] = c1, bits[4 * call + 2] = c2, bits[4 * call + 3] = c3;
  }
}

// --- Codes

// Rounds to e4m3, ties to even. Magnitudes must round to 448 or less. The sum rounds subnormals at 2^-9.
ZCOMM_DEVICE std::uint32_t to_e4m3(float value) {
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & kAbs32;
  const std::uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const std::uint32_t subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - (141u << 23);
  return (magnitude < (121u << 23) ? subnormal : normal) | ((bits >> 24) & 0x80u);
}

// Returns 1 / scale, rounded to nearest, for every finite scale; a scale of 2^126 or more has a subnormal reciprocal.
ZCOMM_DEVICE float any_reciprocal(float scale) {
  const float down = scale < 0x1p126f ? 1.0f : 0x1p-4f;
  return refine_reciprocal(scale, __fmul_rn(approximate_reciprocal(__fmul_rn(scale, down)), down));
}

ZCOMM_DEVICE void quantize_any(const float (&values)[kGroup], float reciprocal, const AnyOut& any, std::uint32_t begin,
                               std::uint32_t (&codes)[kGroup]) {
  if (any.kind == ElementKind::fp8) {
#pragma unroll
    for (int i = 0; i < 16; ++i) codes[i] = to_e4m3(__fmul_rn(values[i], reciprocal));
  } else if (any.stochastic) {
    std::uint32_t bits[kGroup / 2];
    random_bits(any.seed, any.first_element + begin, bits);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const std::int32_t half = static_cast<std::int32_t>(bits[i / 2] << (i % 2 == 0 ? 16 : 0)) >> 16;
      const float offset = __fmaf_rn(static_cast<float>(half), 0x1p-16f, 0x1p-17f);  // exact
      const float scaled = clamp(__fadd_rn(__fmul_rn(values[i], reciprocal), offset), any.max_code);
      codes[i] = __float_as_uint(__fadd_rn(scaled, 0x1.8p23f));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) codes[i] = quantize(values[i], reciprocal);
  }
}

// Writes the codes of the group that begins with element `begin`, or zeros.
ZCOMM_DEVICE void store_any_codes(const std::uint32_t (&codes)[kGroup], bool are_zeros, std::uint32_t begin,
                                  const BlocksOut& out, const AnyOut& any) {
  CodeWords words;
  pack_any(any.kind, codes, words);
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) words[i] = are_zeros ? 0 : words[i];
  const std::uint32_t num_bits = smaller_of(out.num_elements - begin, kGroup) * any.bits;
  store_any(words, any.bits, num_bits, out.codes + begin / 8 * any.bits);
}

// Writes the scale of a block and, after the last one, the padding.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void end_any_block(std::uint32_t scale, const Place<kGroups>& place, const BlocksOut& out,
                                const AnyOut& any) {
  if (place.lane != 0) return;
  store_scale(scale, place.block, out);
  if (!out.is_end || (place.block + 1) * out.block_size < out.num_elements) return;
  const std::uint32_t unit = unit_of(any.bits);
  pad(reinterpret_cast<std::uint16_t*>(out.codes) + (out.num_elements * any.bits + unit - 1) / unit * (unit / 16));
}

// Encodes the rotated values of a thread by EDEN: see codec/cpu/eden.inl. `largest` has the float32 bits of the block's
// largest magnitude. Called by all threads of a warp.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void encode_eden(const Halves32<kGroups>& values, std::uint32_t largest, const Place<kGroups>& place,
                              const BlocksOut& out, const AnyOut& any) {
  EdenCodes<kGroups> codes;
  switch (any.kind) {
    case ElementKind::eden2:
      codes = eden_codes<2, kGroups>(values, largest, place.begin, out);
      break;
    case ElementKind::eden3:
      codes = eden_codes<3, kGroups>(values, largest, place.begin, out);
      break;
    default:
      codes = eden_codes<4, kGroups>(values, largest, place.begin, out);
      break;
  }
  if (place.begin >= out.num_elements) return;
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    const std::uint32_t begin = place.begin + g * kGroup;
    if (begin < out.num_elements) store_any_codes(codes.of[g], codes.are_zeros(), begin, out, any);
  }
  end_any_block(codes.scale, place, out, any);
}

// Encodes a thread's groups, as encode_any does. Values past the end are zeros, and so are those of idle threads.
// Called by all threads of a CTA.
template <std::uint32_t kGroups>
ZCOMM_DEVICE void encode_any_codes(Halves32<kGroups>& values, const Place<kGroups>& place, const BlocksOut& out,
                                   const AnyOut& any, WarpMaxima& maxima) {
  if (is_eden(any.kind)) rotate<kGroups>(values, place.begin, out.num_elements, any.rotation);
  std::uint32_t largest[1] = {largest_magnitude<kGroups>(values)};
  reduce_blocks(largest, 1u << out.log2_lanes, &maxima);
  if (is_eden(any.kind)) return encode_eden<kGroups>(values, largest[0], place, out, any);
  if (!place.is_in_block || place.begin >= out.num_elements) return;
  std::uint32_t scale = make_scale(__uint_as_float(largest[0]), any.max_code, any.max_code_reciprocal);
  scale = largest[0] < kInfinity32 ? scale : kNan32;
  const float reciprocal = any_reciprocal(__uint_as_float(scale));
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    const std::uint32_t begin = place.begin + g * kGroup;
    if (begin >= out.num_elements) break;
    std::uint32_t codes[kGroup];
    quantize_any(values[g], reciprocal, any, begin, codes);
    store_any_codes(codes, scale == kNan32, begin, out, any);
  }
  end_any_block(scale, place, out, any);
}

// --- Kernels for values of every type. A thread has one group.

template <class Type>
ZCOMM_DEVICE void load_floats(const std::byte* values, std::uint32_t begin, std::uint32_t count,
                              float (&floats)[kGroup]) {
  std::uint32_t words[Type::kWords];
  load_group<Type>(values, begin, count, words);
  Type::widen(words, floats);
}

template <class Type>
ZCOMM_DEVICE void store_floats(float (&floats)[kGroup], std::uint32_t begin, std::uint32_t count, std::byte* values) {
#pragma unroll
  for (int i = 0; i < 16; ++i) floats[i] = clamp(floats[i], Type::kLargestFinite);
  std::uint32_t words[Type::kWords];
  Type::narrow(floats, words);
  make_nans_canonical<Type>(words);
  store_warps_group<Type>(words, begin, kGroup, count, values);
}

// Calls call(Type()) with the type of values.
template <class Call>
ZCOMM_DEVICE void with_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::float32:
      return call(Float32());
    case DType::bfloat16:
      return call(Bfloat16());
    case DType::float16:
      return call(Float16());
    case DType::byte_pairs:
      return;  // which are only copied
  }
}

template <class = void>  // a template, so that headers can hold it
__global__ void __launch_bounds__(kThreads) encode_any_kernel(const __grid_constant__ EncodeAnyTable table) {
  __shared__ WarpMaxima maxima;
  const std::uint32_t index = table.find();
  const EncodeAnyPiece& piece = table.pieces[index];
  const Place<1> place(piece.out, (blockIdx.x - table.first_cta[index]) * kThreads + threadIdx.x);
  Halves32<1> values = {};
  if (place.is_in_block) {
    with_type(piece.dtype, [&]<class Type>(Type) {
      load_floats<Type>(piece.values, place.begin, piece.out.num_elements, values[0]);
    });
  }
  encode_any_codes<1>(values, place, piece.out, piece.any, maxima);
}

template <class = void>
__global__ void __launch_bounds__(kThreads) decode_any_kernel(const __grid_constant__ DecodeTable table) {
  const std::uint32_t index = table.find();
  const DecodePiece& piece = table.pieces[index];
  const std::uint32_t begin = ((blockIdx.x - table.first_cta[index]) * kThreads + threadIdx.x) * kGroup;
  Halves32<1> terms;
  load_terms(piece.wire, 0, begin, piece.num_elements, terms[0]);
  if (piece.rotation != 0) rotate_back<1>(terms, begin, piece.num_elements, piece.rotation);
  if (begin >= piece.num_elements) return;
  with_type(piece.dtype,
            [&]<class Type>(Type) { store_floats<Type>(terms[0], begin, piece.num_elements, piece.values); });
}

}  // namespace zcomm::gpu
