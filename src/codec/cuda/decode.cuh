// Decodes scales and codes to values.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/memory.cuh"
#include "codec/cuda/tables.cuh"

namespace zcomm::gpu {

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
