// Values -> scales and codes. Part of kernels.inl.

#include "codec/cpu/philox.inl"

template <class Type>
ZCOMM_INLINE std::uint32_t absmax(const typename Type::Bits* values, std::int64_t count) {
  typename Type::Pattern largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    const auto pattern = static_cast<typename Type::Pattern>(values[i] & Type::kAbs);
    largest = pattern > largest ? pattern : largest;
  }
  return Type::widen(static_cast<std::uint32_t>(largest));
}

#include "codec/cpu/rotate.inl"

// Scales of blocks whose largest magnitudes have the float32 bits `largest`, and their reciprocals: 0 where a block has
// a NaN or infinity. A reciprocal is never 0 otherwise: a scale is finite, if need be (of int2) less than 2^-7 too
// small.
//
// No code needs a clamp: with e = 2^-24, the scale is at least (absmax / max_code) * (1 - e) and its reciprocal at most
// (1 / scale) * (1 + e), so |x * reciprocal|, rounded, is at most max_code * (1 + e)^2 / (1 - e) < max_code + 0.5.
// Below the normal range, where errors are not relative, kMinScale >= absmax / max_code and its reciprocal is exact.
ZCOMM_INLINE void make_scales(const std::uint32_t* largest, std::int64_t num_blocks, float max_code, Word16* scales,
                              float* reciprocals) {
#pragma omp simd
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const bool finite = largest[i] < kInfinity32;
    const float quotient = float_of(finite ? largest[i] : 0u) / max_code;
    const float rounded_up = float_of((bits_of(quotient) + 0xffffu) & 0xffff0000u);
    const float at_least = rounded_up > kMinScale ? rounded_up : kMinScale;
    const float scale = at_least < kMaxScale ? at_least : kMaxScale;
    const float reciprocal = 1.0f / scale;
    scales[i] = finite ? static_cast<std::uint16_t>(bits_of(scale) >> 16) : Bfloat16::kNan;
    reciprocals[i] = finite ? reciprocal : 0.0f;
  }
}

ZCOMM_INLINE std::uint32_t quantized(std::uint32_t value_bits, float reciprocal) {
  const float scaled = float_of(value_bits) * reciprocal;
  return bits_of(scaled + kRoundToInteger);
}

// One code per byte. 16-bit values are taken in pairs, as one little-endian word of 32 bits: half the shuffles.
template <class Type>
ZCOMM_INLINE void quantize(const typename Type::Bits* values, std::int64_t count, float reciprocal,
                           std::uint8_t* codes) {
  if (reciprocal == 0.0f) {
    __builtin_memset(codes, 0, static_cast<std::size_t>(count));
    return;
  }
  std::int64_t done = 0;
  if constexpr (sizeof(typename Type::Bits) == 2) {
    const WordPair* value_pairs = reinterpret_cast<const WordPair*>(values);
    Word16* code_pairs = reinterpret_cast<Word16*>(codes);
#pragma omp simd
    for (std::int64_t i = 0; i < count / 2; ++i) {
      const std::uint32_t first = quantized(Type::widen(value_pairs[i] & 0xffffu), reciprocal);
      const std::uint32_t second = quantized(Type::widen(value_pairs[i] >> 16), reciprocal);
      code_pairs[i] = static_cast<std::uint16_t>((first & 0xffu) | (second << 8));
    }
    done = count / 2 * 2;
  }
#pragma omp simd
  for (std::int64_t i = done; i < count; ++i) {
    codes[i] = static_cast<std::uint8_t>(quantized(Type::widen(values[i]), reciprocal));
  }
}

// `is_scratch`: what comes after `values` is not what is encoded next, so it is not prefetched.
// Calls quantize(values, count, first, reciprocal, codes) for each block, `first` being the index of its first element
// in a tile, and before each tile start_tile(its first element, its elements).
template <class Type, class StartTile, class Quantize>
ZCOMM_INLINE void encode_blocks(const typename Type::Bits* values, std::int64_t count, CodedBlocks blocks,
                                bool is_scratch, std::byte* scale_bytes, std::byte* codes, const StartTile& start_tile,
                                const Quantize& quantize_block) {
  constexpr std::int64_t kMaxBlocks = kTileElements / 32;
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  std::uint32_t largest[kMaxBlocks];
  float reciprocals[kMaxBlocks];
  alignas(64) std::uint8_t unpacked[kTileElements];
  Word16* scales = reinterpret_cast<Word16*>(scale_bytes);
  const std::int64_t block_size = blocks.block_size;
  const std::int64_t tile = kTileElements / block_size * block_size;
  for (std::int64_t begin = 0; begin < count; begin += tile) {
    const std::int64_t tile_count = min_of(tile, count - begin);
    const std::int64_t num_blocks = (tile_count + block_size - 1) / block_size;
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      largest[i] = absmax<Type>(values + i * block_size, min_of(block_size, tile_count - i * block_size));
    }
    make_scales(largest, num_blocks, blocks.max_code, scales, reciprocals);
    std::uint8_t* bytes = is_bytes(blocks.kind) ? reinterpret_cast<std::uint8_t*>(codes) : unpacked;
    start_tile(begin, tile_count);
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      if (!is_scratch) prefetch(values + i * block_size, tile_count * kBytes, block_size * kBytes);
      quantize_block(values + i * block_size, min_of(block_size, tile_count - i * block_size), i * block_size,
                     reciprocals[i], bytes + i * block_size);
    }
    if (!is_bytes(blocks.kind)) pack(blocks.kind, unpacked, tile_count, codes);
    values += tile_count;
    scales += num_blocks;
    codes += packed_bytes(blocks.kind, tile_count);
  }
}

template <class Type>
ZCOMM_INLINE void encode_nearest(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                                 bool is_scratch, std::byte* scales, std::byte* codes) {
  encode_blocks<Type>(
      values, count, blocks, is_scratch, scales, codes, [](std::int64_t, std::int64_t) {},
      [](const typename Type::Bits* block, std::int64_t block_count, std::int64_t, float reciprocal,
         std::uint8_t* block_codes) { quantize<Type>(block, block_count, reciprocal, block_codes); });
}

template <class Type>
void encode(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::byte* scales, std::byte* codes) {
  encode_nearest<Type>(reinterpret_cast<const typename Type::Bits*>(values), count, blocks, false, scales, codes);
}

void encode_float16(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::byte* scales,
                    std::byte* codes) {
  alignas(64) float widened[kTileElements];
  const std::int64_t tile = kTileElements / blocks.block_size * blocks.block_size;
  for (std::int64_t i = 0; i < count; i += tile) {
    const std::int64_t tile_count = min_of(tile, count - i);
    Float16::widen_row(reinterpret_cast<const Word16*>(values) + i, tile_count, widened);
    encode_nearest<Float32>(reinterpret_cast<const Word32*>(widened), tile_count, blocks, true,
                            scales + i / blocks.block_size * 2, codes + packed_bytes(blocks.kind, i));
  }
}

// `bits`: 16 random ones for each value. The sum with a value needs a clamp: see make_scales.
ZCOMM_INLINE void quantize_stochastic(const Word32* values, const Word16* bits, std::int64_t count, float reciprocal,
                                      float max_code, std::uint8_t* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float offset = (static_cast<float>(static_cast<std::int16_t>(bits[i])) + 0.5f) * 0x1p-16f;
    float scaled = float_of(values[i]) * reciprocal + offset;
    scaled = scaled < max_code ? scaled : max_code;
    scaled = scaled > -max_code ? scaled : -max_code;
    codes[i] = static_cast<std::uint8_t>(bits_of(scaled + kRoundToInteger));
  }
}

ZCOMM_INLINE void quantize_e4m3(const Word32* values, std::int64_t count, float reciprocal, std::uint8_t* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) codes[i] = to_e4m3(float_of(values[i]) * reciprocal);
}

void encode_tile(const float* values, std::int64_t count, CodedBlocks blocks, const Random* random, bool is_scratch,
                 std::byte* scales, std::byte* codes) {
  if (random == nullptr && blocks.kind != CodeKind::fp8) {
    encode_nearest<Float32>(reinterpret_cast<const Word32*>(values), count, blocks, is_scratch, scales, codes);
    return;
  }
  alignas(64) Word16 bits[kTileElements + sizeof(Calls)];
  encode_blocks<Float32>(
      reinterpret_cast<const Word32*>(values), count, blocks, is_scratch, scales, codes,
      [&](std::int64_t begin, std::int64_t tile_count) {
        if (random != nullptr) random_bits({random->seed, random->first_element + begin}, tile_count, bits);
      },
      [&](const Word32* block, std::int64_t block_count, std::int64_t first, float reciprocal,
          std::uint8_t* block_codes) {
        if (reciprocal == 0.0f) {
          __builtin_memset(block_codes, 0, static_cast<std::size_t>(block_count));
        } else if (random != nullptr) {
          quantize_stochastic(block, bits + first, block_count, reciprocal, blocks.max_code, block_codes);
        } else {
          quantize_e4m3(block, block_count, reciprocal, block_codes);
        }
      });
}
