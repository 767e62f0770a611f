// Scales and codes, and the kernels that encode and decode the most common kinds.
#pragma once

#include "codec/cuda/memory.cuh"
#include "codec/cuda/tables.cuh"

namespace zcomm::gpu {

// --- Scales. The host codec divides; see make_scales() in codec/cpu/encode.inl.

// Returns x / max_code, rounded to nearest, for finite x >= 0 whose quotient is at least 2^-126; below that, a number
// less than 2^-126. The product with `reciprocal` (1 / max_code) is within one unit of the quotient, and its remainder
// is exact: adding the remainder's part gives the correct rounding (Markstein).
ZCOMM_DEVICE float divide_by_max_code(float x, float max_code, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, max_code, x), reciprocal, quotient);
}

// Returns 1 / scale, rounded to nearest, from an approximation that is at most one unit off. One Newton step leaves a
// relative error of 2^-46; no reciprocal of 8 significant bits is that near to the middle between two floats.
ZCOMM_DEVICE float refine_reciprocal(float scale, float approximation) {
  return __fmaf_rn(approximation, __fmaf_rn(-scale, approximation, 1.0f), approximation);
}

ZCOMM_DEVICE float approximate_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
#else
  return 1.0f / x;
#endif
}

// Returns the float32 bits of the scale of a block of finite values; infinity's beyond the largest bfloat16.
ZCOMM_DEVICE std::uint32_t make_scale(float absmax, float max_code, float reciprocal) {
  const float quotient = divide_by_max_code(absmax, max_code, reciprocal);
  const std::uint32_t rounded_up = (__float_as_uint(quotient) + 0xffffu) & 0xffff0000u;
  constexpr std::uint32_t kMinScale = 0x00800000u;  // 2^-126
  return larger_of(rounded_up, kMinScale);
}

// --- Codes

// Rounds x * reciprocal to nearest even; the low bits of the result are the code.
ZCOMM_DEVICE std::uint32_t quantize(float x, float reciprocal) {
  return __float_as_uint(__fadd_rn(__fmul_rn(x, reciprocal), 0x1.8p23f));
}

// Packs the low bytes of four words.
ZCOMM_DEVICE std::uint32_t pack_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Returns byte i of `bytes`, less than 256, plus 32768: a float without a conversion.
ZCOMM_DEVICE float byte_to_float(std::uint32_t bytes, int i) {
  return __uint_as_float(__byte_perm(bytes, 0x47000000u, 0x7404u | static_cast<std::uint32_t>(i) << 4));
}

struct Int8 {
  static constexpr float kMaxCode = 127.0f;
  static constexpr int kWords = 4;  // of the codes of a group
  static constexpr int kCodesPerByte = 1;
  static constexpr float kBias = 32768.0f + 128.0f;

  static ZCOMM_DEVICE void pack(const std::uint32_t (&codes)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = pack_bytes(codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]);
    }
  }
  // Unpacks codes plus kBias.
  static ZCOMM_DEVICE void unpack(const std::uint32_t* words, float (&biased)[kGroup]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) biased[i] = byte_to_float(words[i / 4] ^ 0x80808080u, i % 4);
  }
};

struct Int4 {
  static constexpr float kMaxCode = 7.0f;
  static constexpr int kWords = 2;
  static constexpr int kCodesPerByte = 2;
  static constexpr float kBias = 32768.0f + 8.0f;

  static ZCOMM_DEVICE void pack(const std::uint32_t (&codes)[kGroup], std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t even = pack_bytes(codes[8 * i], codes[8 * i + 2], codes[8 * i + 4], codes[8 * i + 6]);
      const std::uint32_t odd = pack_bytes(codes[8 * i + 1], codes[8 * i + 3], codes[8 * i + 5], codes[8 * i + 7]);
      words[i] = (even & 0x0f0f0f0fu) | ((odd << 4) & 0xf0f0f0f0u);
    }
  }
  static ZCOMM_DEVICE void unpack(const std::uint32_t* words, float (&biased)[kGroup]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t word = words[i / 4] ^ 0x88888888u;
      biased[2 * i] = byte_to_float(word & 0x0f0f0f0fu, i % 4);
      biased[2 * i + 1] = byte_to_float((word >> 4) & 0x0f0f0f0fu, i % 4);
    }
  }
};

// Keeps NaN.
ZCOMM_DEVICE float clamp(float value, float limit) {
  if (value > limit) value = limit;
  if (value < -limit) value = -limit;
  return value;
}

// Returns code * scale, both kept within their limits. Accepts any scale, NaN included.
template <class Codes>
ZCOMM_DEVICE void dequantize_special(const float (&biased)[kGroup], float scale, float limit, float (&terms)[kGroup]) {
  scale = clamp(scale, Float32::kLargestFinite);
#pragma unroll
  for (int i = 0; i < 16; ++i) terms[i] = clamp(__fmul_rn(__fadd_rn(biased[i], -Codes::kBias), scale), limit);
}

// --- Encoding

// Tells whether a wire has codes, or zeros that pad them to 16 bytes, for the group that begins with this element.
template <class Codes>
ZCOMM_DEVICE bool has_codes(std::uint32_t begin, std::uint32_t num_elements) {
  constexpr std::uint32_t kUnit = 16 * Codes::kCodesPerByte;
  return begin / kUnit * kUnit < num_elements;
}

// Maps a thread to its kGroups groups among the blocks that a piece writes. The number of threads that share a block is
// a power of two, so that they form a shuffle segment or whole warps.
template <std::uint32_t kGroups>
struct Place {
  ZCOMM_DEVICE Place(const BlocksOut& out, std::uint32_t slot)
      : block(slot >> out.log2_lanes),
        lane(slot & ((1u << out.log2_lanes) - 1)),
        begin(block * out.block_size + lane * (kGroups * kGroup)),
        is_in_block(lane * (kGroups * kGroup) < out.block_size) {}

  std::uint32_t block;
  std::uint32_t lane;
  std::uint32_t begin;  // the first element
  bool is_in_block;
};

using WarpMaxima = std::uint32_t[kThreads / 32];

// Returns the largest value of a block, given that of each group. Called by all threads of a CTA.
template <int kUnroll>
ZCOMM_DEVICE void reduce_blocks(std::uint32_t (&largest)[kUnroll], std::uint32_t lanes, WarpMaxima* maxima) {
#pragma unroll
  for (std::uint32_t offset = 1; offset < 32; offset *= 2) {
    if (offset >= lanes) continue;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      largest[u] = larger_of(largest[u], __shfl_xor_sync(0xffffffffu, largest[u], static_cast<int>(offset)));
    }
  }
  if (lanes <= 32) return;
  const std::uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) maxima[u][warp] = largest[u];
  }
  __syncthreads();
  const std::uint32_t num_warps = lanes / 32;
  const std::uint32_t first = warp & ~(num_warps - 1);
#pragma unroll 1
  for (std::uint32_t i = first; i < first + num_warps; ++i) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) largest[u] = larger_of(largest[u], maxima[u][i]);
  }
}

// Returns the scale of a block whose largest magnitude has the float32 bits `largest`, NaN if a value is not finite.
template <class Codes>
ZCOMM_DEVICE std::uint32_t scale_of(std::uint32_t largest) {
  const std::uint32_t scale = make_scale(__uint_as_float(largest), Codes::kMaxCode, 1.0f / Codes::kMaxCode);
  return largest < kInfinity32 ? scale : kNan32;
}

// Writes the codes of the group that begins with element `begin`, zeros if the scale is NaN.
template <class Type, class Codes>
ZCOMM_DEVICE void store_codes(const std::uint32_t (&words)[Type::kWords], std::uint32_t scale, std::uint32_t begin,
                              const BlocksOut& out) {
  const float divisor = __uint_as_float(scale);
  const float reciprocal = refine_reciprocal(divisor, approximate_reciprocal(divisor));
  float values[kGroup];
  Type::widen(words, values);
  std::uint32_t codes[kGroup];
#pragma unroll
  for (int i = 0; i < 16; ++i) codes[i] = quantize(values[i], reciprocal);
  std::uint32_t packed[Codes::kWords];
  Codes::pack(codes, packed);
#pragma unroll
  for (int i = 0; i < Codes::kWords; ++i) packed[i] = scale == kNan32 ? 0 : packed[i];
  store_words(packed, out.codes + begin / Codes::kCodesPerByte);
}

// Zeros numbers up to an address that is aligned to 16 bytes.
template <class Number>
ZCOMM_DEVICE void pad(Number* end) {
  for (; !is_aligned(end); ++end) *end = 0;
}

// Writes the scale of a block, and after the last one the padding.
ZCOMM_DEVICE void store_scale(std::uint32_t scale, std::uint32_t block, const BlocksOut& out) {
  std::uint16_t* scales = reinterpret_cast<std::uint16_t*>(out.scales) + block;
  *scales = static_cast<std::uint16_t>(scale >> 16);
  if (out.is_end && (block + 1) * out.block_size >= out.num_elements) pad(scales + 1);
}

// Encodes a thread's groups where blocks may be short and threads idle. Values past the end and those of idle threads
// are zeros; their codes pad the wire. Called by all threads of a CTA.
template <class Type, class Codes, std::uint32_t kGroups>
ZCOMM_DEVICE void encode_any(const std::uint32_t (&words)[kGroups][Type::kWords], const Place<kGroups>& place,
                             const BlocksOut& out, WarpMaxima& maxima) {
  std::uint32_t largest[1] = {0};
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) largest[0] = larger_of(largest[0], absmax<Type>(words[g]));
  reduce_blocks(largest, 1u << out.log2_lanes, &maxima);
  if (!place.is_in_block) return;
  const std::uint32_t scale = scale_of<Codes>(largest[0]);
#pragma unroll
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    const std::uint32_t begin = place.begin + g * kGroup;
    if (has_codes<Codes>(begin, out.num_elements)) store_codes<Type, Codes>(words[g], scale, begin, out);
  }
  if (place.lane == 0 && place.begin < out.num_elements) store_scale(scale, place.block, out);
}

// Groups that a thread reads before it computes: 128 bytes.
template <class Type>
inline constexpr std::uint32_t kEncodeUnroll = 8 / Type::kBytes;

template <class Type, class Codes>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ EncodeTable table) {
  constexpr std::uint32_t kUnroll = kEncodeUnroll<Type>;
  __shared__ WarpMaxima maxima[kUnroll];
  const std::uint32_t index = table.find();
  const EncodePiece& piece = table.pieces[index];
  const std::uint32_t first_slot = (blockIdx.x - table.first_cta[index]) * (kUnroll * kThreads);
  const std::uint32_t slot = first_slot + threadIdx.x;
  const bool is_whole = piece.out.block_size == kGroup << piece.out.log2_lanes &&
                        (first_slot + kUnroll * kThreads) * kGroup <= piece.out.num_elements;
  if (is_whole && is_aligned(piece.values)) {
    std::uint32_t words[kUnroll][Type::kWords];
    std::uint32_t largest[kUnroll];
#pragma unroll
    for (std::uint32_t u = 0; u < kUnroll; ++u) {
      load_words(piece.values + (slot + u * kThreads) * kGroup * Type::kBytes, words[u]);
    }
#pragma unroll
    for (std::uint32_t u = 0; u < kUnroll; ++u) largest[u] = absmax<Type>(words[u]);
    reduce_blocks(largest, 1u << piece.out.log2_lanes, maxima);
#pragma unroll
    for (std::uint32_t u = 0; u < kUnroll; ++u) {
      const Place<1> place(piece.out, slot + u * kThreads);
      const std::uint32_t scale = scale_of<Codes>(largest[u]);
      store_codes<Type, Codes>(words[u], scale, (slot + u * kThreads) * kGroup, piece.out);
      if (place.lane == 0) store_scale(scale, place.block, piece.out);
    }
    return;
  }
#pragma unroll 1
  for (std::uint32_t u = 0; u < kUnroll; ++u) {
    const Place<1> place(piece.out, slot + u * kThreads);
    std::uint32_t words[1][Type::kWords] = {};
    if (place.is_in_block) load_group<Type>(piece.values, place.begin, piece.out.num_elements, words[0]);
    encode_any<Type, Codes>(words, place, piece.out, maxima[u]);
  }
}

// --- Decoding

ZCOMM_DEVICE std::uint32_t load_scale(const std::byte* scale) { return *reinterpret_cast<const std::uint16_t*>(scale); }

ZCOMM_DEVICE float scale_value(std::uint32_t scale) { return __uint_as_float(scale << 16); }

// Tells whether all codes times a scale, a bfloat16 pattern, are finite in `Type`, also after the bias of codes is
// added. This holds for all blocks except those with the largest scales. A wire that no codec wrote may have a scale of
// zero or less, and a code of -128.
template <class Type>
ZCOMM_DEVICE bool is_plain_scale(std::uint32_t scale) {
  constexpr std::uint32_t kLargest = Type::kLargestFinite < 0x1p16f ? 0x43ffu : 0x7780u;  // before 2^9, 2^112
  return scale - 1 < kLargest;
}

template <class Type, class Codes>
ZCOMM_DEVICE void decode_group(const std::uint32_t (&codes)[Codes::kWords], std::uint32_t scale_bits,
                               std::uint32_t (&words)[Type::kWords]) {
  const float scale = scale_value(scale_bits);
  float biased[kGroup];
  Codes::unpack(codes, biased);
  float terms[kGroup];
  if (is_plain_scale<Type>(scale_bits)) {
    const float bias = __fmul_rn(-Codes::kBias, scale);
#pragma unroll
    for (int i = 0; i < 16; ++i) terms[i] = __fmaf_rn(biased[i], scale, bias);  // exact, as are the products
    Type::narrow(terms, words);
  } else {
    dequantize_special<Codes>(biased, scale, Type::kLargestFinite, terms);
    Type::narrow(terms, words);
    make_nans_canonical<Type>(words);
  }
}

// Groups whose codes a thread reads before it computes.
inline constexpr std::uint32_t kDecodeUnroll = 4;

template <class Type, class Codes>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeTable table) {
  constexpr std::uint32_t kUnroll = kDecodeUnroll;
  const std::uint32_t index = table.find();
  const DecodePiece& piece = table.pieces[index];
  const std::uint32_t first_group = (blockIdx.x - table.first_cta[index]) * (kUnroll * kThreads);
  const std::uint32_t group = first_group + threadIdx.x;
  const bool is_whole = (first_group + kUnroll * kThreads) * kGroup <= piece.num_elements;
  if (is_whole && is_aligned(piece.values)) {
    std::uint32_t codes[kUnroll][Codes::kWords];
    std::uint32_t scales[kUnroll];
#pragma unroll
    for (std::uint32_t u = 0; u < kUnroll; ++u) {
      load_words(piece.wire.data + (group + u * kThreads) * Codes::kWords * 4, codes[u]);
      scales[u] = load_scale(piece.wire.scale(group + u * kThreads));
    }
#pragma unroll
    for (std::uint32_t u = 0; u < kUnroll; ++u) {
      std::uint32_t words[Type::kWords];
      decode_group<Type, Codes>(codes[u], scales[u], words);
      store_words_in_pairs(words, piece.values + (group + u * kThreads) * kGroup * Type::kBytes, kGroup * Type::kBytes);
    }
    return;
  }
#pragma unroll 1
  for (std::uint32_t u = 0; u < kUnroll; ++u) {
    const std::uint32_t begin = (group + u * kThreads) * kGroup;
    if (begin >= piece.num_elements) return;
    std::uint32_t codes[Codes::kWords];
    load_words(piece.wire.data + begin / Codes::kCodesPerByte, codes);  // a wire ends with a whole group
    std::uint32_t words[Type::kWords];
    decode_group<Type, Codes>(codes, load_scale(piece.wire.scale(begin / kGroup)), words);
    store_group<Type>(words, begin, piece.num_elements, piece.values);
  }
}

}  // namespace zcomm::gpu
