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

constexpr std::int64_t kMaxBlocks = kTileElements / 32;  // of a tile

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

// One tile, of whose blocks `largest` has the largest magnitudes as float32 bits. Calls
// quantize_block(values, count, first, reciprocal, codes) for each block, `first` being the index of its first element.
template <class Type, class Quantize>
ZCOMM_INLINE void encode_blocks(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                                const std::uint32_t* largest, bool is_scratch, std::byte* scales, std::byte* codes,
                                const Quantize& quantize_block) {
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  float reciprocals[kMaxBlocks];
  alignas(64) std::uint8_t unpacked[kTileElements];
  const std::int64_t block_size = blocks.block_size;
  const std::int64_t num_blocks = (count + block_size - 1) / block_size;
  make_scales(largest, num_blocks, blocks.max_code, reinterpret_cast<Word16*>(scales), reciprocals);
  std::uint8_t* bytes = is_bytes(blocks.kind) ? reinterpret_cast<std::uint8_t*>(codes) : unpacked;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::int64_t first = i * block_size;
    if (!is_scratch) prefetch(values + first, count * kBytes, block_size * kBytes);
    quantize_block(values + first, min_of(block_size, count - first), first, reciprocals[i], bytes + first);
  }
  if (!is_bytes(blocks.kind)) pack(blocks.kind, unpacked, count, codes);
}

// `largest` gets the largest magnitudes of the blocks, as float32 bits.
template <class Type>
ZCOMM_INLINE void widen(const typename Type::Bits* values, std::int64_t count, std::int64_t block_size, float* widened,
                        std::uint32_t* largest) {
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  for (std::int64_t i = 0; i < count; i += block_size) {
    const std::int64_t block_count = min_of(block_size, count - i);
    prefetch(values + i, count * kBytes, block_count * kBytes);
    widen_row<Type>(values + i, block_count, widened + i);
    *largest++ = absmax<Type>(values + i, block_count);
  }
}

ZCOMM_INLINE std::int64_t encode_tile_elements(std::int64_t block_size) {
  return block_size < kEncodeTile ? kEncodeTile / block_size * block_size : block_size;
}

template <class Type>
ZCOMM_INLINE void encode_nearest(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                                 const std::uint32_t* largest, bool is_scratch, std::byte* scales, std::byte* codes) {
  encode_blocks<Type>(values, count, blocks, largest, is_scratch, scales, codes,
                      [](const typename Type::Bits* block, std::int64_t block_count, std::int64_t, float reciprocal,
                         std::uint8_t* block_codes) { quantize<Type>(block, block_count, reciprocal, block_codes); });
}

template <class Type>
void encode(const std::byte* value_bytes, std::int64_t count, CodedBlocks blocks, std::byte* scales, std::byte* codes) {
  const auto* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
  std::uint32_t largest[kMaxBlocks];
  const std::int64_t tile = encode_tile_elements(blocks.block_size);
  for (std::int64_t i = 0; i < count; i += tile) {
    const std::int64_t tile_count = min_of(tile, count - i);
    for (std::int64_t block = 0, first = 0; first < tile_count; ++block, first += blocks.block_size) {
      largest[block] = absmax<Type>(values + i + first, min_of(blocks.block_size, tile_count - first));
    }
    encode_nearest<Type>(values + i, tile_count, blocks, largest, false, scales + i / blocks.block_size * 2,
                         codes + packed_bytes(blocks.kind, i));
  }
}

void encode_float16(const std::byte* values, std::int64_t count, CodedBlocks blocks, std::byte* scales,
                    std::byte* codes) {
  alignas(64) float widened[kTileElements];
  std::uint32_t largest[kMaxBlocks];
  const std::int64_t tile = encode_tile_elements(blocks.block_size);
  for (std::int64_t i = 0; i < count; i += tile) {
    const std::int64_t tile_count = min_of(tile, count - i);
    widen<Float16>(reinterpret_cast<const Word16*>(values) + i, tile_count, blocks.block_size, widened, largest);
    encode_nearest<Float32>(reinterpret_cast<const Word32*>(widened), tile_count, blocks, largest, true,
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

template <class Type>
void encode_tile(const std::byte* value_bytes, std::int64_t count, CodedBlocks blocks, const Random* random,
                 std::byte* scales, std::byte* codes) {
  const auto* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
  std::uint32_t largest[kMaxBlocks];
  alignas(64) float widened[kTileElements];
  const Word32* bits = reinterpret_cast<const Word32*>(widened);
  if (blocks.hadamard) {
    rotate<Type>(values, count, blocks.block_size, widened, largest);
  } else {
    widen<Type>(values, count, blocks.block_size, widened, largest);
  }
  if (random == nullptr && blocks.kind != CodeKind::fp8) {
    encode_nearest<Float32>(bits, count, blocks, largest, true, scales, codes);
    return;
  }
  alignas(64) Word16 numbers[kTileElements + sizeof(Calls)];
  if (random != nullptr) random_bits(*random, count, numbers);
  encode_blocks<Float32>(bits, count, blocks, largest, true, scales, codes,
                         [&](const Word32* block, std::int64_t block_count, std::int64_t first, float reciprocal,
                             std::uint8_t* block_codes) {
                           if (reciprocal == 0.0f) {
                             __builtin_memset(block_codes, 0, static_cast<std::size_t>(block_count));
                           } else if (random != nullptr) {
                             quantize_stochastic(block, numbers + first, block_count, reciprocal, blocks.max_code,
                                                 block_codes);
                           } else {
                             quantize_e4m3(block, block_count, reciprocal, block_codes);
                           }
                         });
}
