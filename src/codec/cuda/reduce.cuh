// Sums wires, to values or to blocks.
#pragma once

#include <type_traits>

#include "codec/cuda/any_codes.cuh"

namespace zcomm::gpu {

// Groups per thread in a sum. Blocks are multiples of 32 elements, so the two groups share their scales.
inline constexpr std::uint32_t kSumGroups = 2;
inline constexpr std::uint32_t kSumElements = kSumGroups * kGroup;
inline constexpr std::uint32_t kSumThreads = 128;  // of a CTA: the largest block is shared by as many
// CTAs per multiprocessor, for enough loads in flight. Where additions take register pairs, as many would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr std::uint32_t kSumCtas = 4;
#else
inline constexpr std::uint32_t kSumCtas = 5;
#endif
using Sum = Halves32<kSumGroups>;

// Loads codes and scale of a thread's elements in one wire.
template <class Codes>
ZCOMM_DEVICE void load_coded(const WirePart& wire, std::uint64_t offset, std::uint32_t begin,
                             std::uint32_t num_elements, std::uint32_t (&codes)[kSumGroups * Codes::kWords],
                             std::uint32_t& scale) {
  constexpr std::uint32_t kElements = 16 * Codes::kCodesPerByte;  // in 16 bytes
  const std::byte* data = wire.data + (offset + begin / Codes::kCodesPerByte);
#pragma unroll
  for (std::uint32_t i = 0; i < kSumElements / kElements; ++i) {
    std::uint32_t quad[4] = {};
    if (i == 0 || begin + i * kElements < num_elements) load_words(data + 16 * i, quad);
#pragma unroll
    for (int k = 0; k < 4; ++k) codes[4 * i + k] = quad[k];
  }
  scale = load_scale(wire.scale(begin / kGroup) + offset);
}

// Adds the terms of kWires wires, in order, from element `begin` on. Their loads are in flight together.
template <class Codes, int kWires>
ZCOMM_DEVICE void add_codes(const WirePart* wires, std::uint64_t offset, std::uint32_t begin,
                            std::uint32_t num_elements, Sum& sum) {
  std::uint32_t codes[kWires][kSumGroups * Codes::kWords], scales[kWires];
  bool are_plain = true;
#pragma unroll
  for (int w = 0; w < kWires; ++w) load_coded<Codes>(wires[w], offset, begin, num_elements, codes[w], scales[w]);
#pragma unroll
  for (int w = 0; w < kWires; ++w) are_plain = are_plain && is_plain_scale<Float32>(scales[w]);
  float terms[kGroup];
  if (are_plain) {
#pragma unroll
    for (int w = 0; w < kWires; ++w) {
#pragma unroll
      for (std::uint32_t g = 0; g < kSumGroups; ++g) {
        Codes::unpack(codes[w] + g * Codes::kWords, terms);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          sum[g][i] = __fmaf_rn(__fadd_rn(terms[i], -Codes::kBias), scale_value(scales[w]), sum[g][i]);
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int w = 0; w < kWires; ++w) {  // rare: repeated in compact code
    load_coded<Codes>(wires[w], offset, begin, num_elements, codes[0], scales[0]);
#pragma unroll
    for (std::uint32_t g = 0; g < kSumGroups; ++g) {
      Codes::unpack(codes[0] + g * Codes::kWords, terms);
      dequantize_special<Codes>(terms, scale_value(scales[0]), Float32::kLargestFinite, terms);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[g][i] = __fadd_rn(sum[g][i], terms[i]);
    }
  }
}

// Adds wires of one kind, with 64 bytes of codes in flight.
template <class Codes>
ZCOMM_DEVICE void add_run(const WirePart* wires, std::uint32_t run, std::uint64_t offset, std::uint32_t begin,
                          std::uint32_t num_elements, Sum& sum) {
  constexpr std::uint32_t kWires = 2 * Codes::kCodesPerByte;
#pragma unroll 1
  for (; run >= kWires; run -= kWires, wires += kWires)
    add_codes<Codes, kWires>(wires, offset, begin, num_elements, sum);
#pragma unroll 1
  for (; run > 0; --run, ++wires) add_codes<Codes, 1>(wires, offset, begin, num_elements, sum);
}

// Adds codes of any kind and factor.
ZCOMM_DEVICE void add_any(const WirePart* wires, std::uint32_t run, std::uint64_t offset, std::uint32_t begin,
                          std::uint32_t num_elements, Sum& sum) {
#pragma unroll 1
  for (; run > 0; --run, ++wires) {
#pragma unroll
    for (std::uint32_t g = 0; g < kSumGroups; ++g) {
      float terms[kGroup];
      load_terms(*wires, offset, begin + g * kGroup, num_elements, terms);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[g][i] = __fadd_rn(sum[g][i], terms[i]);
    }
  }
}

template <class Type>
ZCOMM_DEVICE void add_values(const WirePart* wires, std::uint32_t run, std::uint32_t repeat, std::uint32_t begin,
                             std::uint32_t num_elements, Sum& sum) {
#pragma unroll 1
  for (; run > 0; --run, ++wires) {
    std::uint32_t words[kSumGroups][Type::kWords];
#pragma unroll
    for (std::uint32_t g = 0; g < kSumGroups; ++g) {
      load_group<Type>(wires->data + distance(wires->magic, repeat), begin + g * kGroup, num_elements, words[g]);
    }
#pragma unroll
    for (std::uint32_t g = 0; g < kSumGroups; ++g) {
      float terms[kGroup];
      Type::widen(words[g], terms);
      float factor = wires->factor;
      if (wires->nan_is_zero) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float term = __fmul_rn(terms[i], factor);
          terms[i] = term == term ? term : 0.0f;
        }
        factor = 1.0f;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[g][i] = __fadd_rn(sum[g][i], __fmul_rn(terms[i], factor));
    }
  }
}

// Adds a run of wires of one source.
ZCOMM_DEVICE void add_source(const WirePart* wires, std::uint32_t run, std::uint32_t repeat, std::uint32_t codes_stride,
                             std::uint32_t any_stride, std::uint32_t begin, std::uint32_t num_elements, Sum& sum) {
  switch (wires->source) {
    case Source::float32:
      add_values<Float32>(wires, run, repeat, begin, num_elements, sum);
      break;
    case Source::bfloat16:
      add_values<Bfloat16>(wires, run, repeat, begin, num_elements, sum);
      break;
    case Source::float16:
      add_values<Float16>(wires, run, repeat, begin, num_elements, sum);
      break;
    case Source::int8:
      add_run<Int8>(wires, run, distance(codes_stride, repeat), begin, num_elements, sum);
      break;
    case Source::int4:
      add_run<Int4>(wires, run, distance(codes_stride, repeat), begin, num_elements, sum);
      break;
    case Source::any:
      add_any(wires, run, distance(any_stride, repeat), begin, num_elements, sum);
      break;
  }
}

// Sums the wires of a piece's repeat from element `begin`, a multiple of 32, on. The sum is undefined past the end, and
// for threads without elements. All threads of a warp call this.
template <class Table>
ZCOMM_DEVICE void sum_wires(const Table& table, const typename Table::Piece& piece, std::uint32_t codes_stride,
                            std::uint32_t any_stride, std::uint32_t repeat, std::uint32_t begin,
                            std::uint32_t num_elements, bool has_elements, Sum& sum) {
  // Starts from -0, as -0 plus x is x for either sign of x. Where codes come first, the host begins with 0.
  const float start = table.wires[piece.begin_of_wires].source < Source::int8 ? -0.0f : 0.0f;
#pragma unroll
  for (std::uint32_t g = 0; g < kSumGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[g][i] = start;
  }
  std::uint32_t w = piece.begin_of_wires;
  do {
    const WirePart* wires = table.wires + w;
    const std::uint32_t run = wires->run;
    if (has_elements) add_source(wires, run, repeat, codes_stride, any_stride, begin, num_elements, sum);
    w += run;
    if (w == piece.rotated_end) rotate_back<kSumGroups>(sum, begin, num_elements, piece.rotation);
  } while (w < piece.end_of_wires);
}

template <class Type>
__global__ void __launch_bounds__(kSumThreads, kSumCtas) sum_kernel(const __grid_constant__ SumTable table) {
  const std::uint32_t index = table.find();
  const SumPiece& piece = table.pieces[index];
  const std::uint32_t slot = (blockIdx.x - table.first_cta[index]) * kSumThreads + threadIdx.x;
  const std::uint32_t begin = slot * kSumElements;
  Sum sum;
  sum_wires(table, piece, 0, 0, 0, begin, piece.num_elements, begin < piece.num_elements, sum);
  if (begin >= piece.num_elements) return;
  const std::uint32_t limit = __float_as_uint(piece.limit);
#pragma unroll
  for (std::uint32_t g = 0; g < kSumGroups; ++g) {
    if (limit < kInfinity32) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const std::uint32_t bits = __float_as_uint(sum[g][i]);
        const std::uint32_t magnitude = bits & kAbs32;
        if (magnitude > limit && magnitude < kInfinity32) sum[g][i] = __uint_as_float((bits & ~kAbs32) | limit);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[g][i] = __fmul_rn(sum[g][i], piece.factor);
    std::uint32_t words[Type::kWords];
    Type::narrow(sum[g], words);
    make_nans_canonical<Type>(words);
    store_warps_group<Type>(words, begin + g * kGroup, kSumElements, piece.num_elements, piece.values);
  }
}

// Zeros the sum past the end.
ZCOMM_DEVICE void cut_off(Sum& sum, std::uint32_t begin, std::uint32_t num_elements) {
  if (begin + kSumElements <= num_elements) return;
#pragma unroll
  for (std::uint32_t i = 0; i < kSumElements; ++i) {
    if (begin + i >= num_elements) sum[i / kGroup][i % kGroup] = 0.0f;
  }
}

// Codes: void for codes of any kind.
template <class Codes>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    sum_encode_kernel(const __grid_constant__ SumEncodeTable table) {
  __shared__ WarpMaxima maxima;
  const std::uint32_t index = table.find();
  const SumEncodePiece& piece = table.pieces[index];
  const std::uint32_t num_ctas = piece.num_ctas, cta = blockIdx.x - table.first_cta[index];
  const std::uint32_t repeat = cta < num_ctas ? 0 : cta / num_ctas;
  const std::uint32_t num_elements = piece.out.num_elements;
  const Place<kSumGroups> place(piece.out, (cta - repeat * num_ctas) * kSumThreads + threadIdx.x);
  const bool has_elements = place.is_in_block && place.begin < num_elements;
  Sum sum;
  sum_wires(table, piece, piece.codes_stride, piece.any_stride, repeat, place.begin, num_elements, has_elements, sum);
  cut_off(sum, has_elements ? place.begin : num_elements, num_elements);
  if constexpr (std::is_void_v<Codes>) {
    encode_any_codes<kSumGroups>(sum, place, piece.out_of(repeat), piece.any, maxima);
  } else {
    std::uint32_t words[kSumGroups][kGroup];
#pragma unroll
    for (std::uint32_t g = 0; g < kSumGroups; ++g) Float32::narrow(sum[g], words[g]);
    encode_any<Float32, Codes>(words, place, piece.out_of(repeat), maxima);
  }
}

}  // namespace zcomm::gpu
