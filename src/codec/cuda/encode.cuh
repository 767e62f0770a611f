// Encodes values to scales and codes.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/memory.cuh"
#include "codec/cuda/tables.cuh"

namespace zcomm::gpu {

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

// Writes the scale of a block, and after the last one the padding.
ZCOMM_DEVICE void store_scale(std::uint32_t scale, std::uint32_t block, const BlocksOut& out) {
  std::uint16_t* scales = reinterpret_cast<std::uint16_t*>(out.scales) + block;
  *scales = static_cast<std::uint16_t>(scale >> 16);
  if ((block + 1) * out.block_size < out.num_elements) return;
  for (std::uint32_t i = 1; i <= out.scale_padding; ++i) scales[i] = 0;
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

}  // namespace zcomm::gpu
