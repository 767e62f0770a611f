// Encodes values to scales and codes. Part of kernels.inl.

#include "codec/cpu/philox.inl"

template <class Type>
__attribute__((noinline)) std::uint32_t absmax_rest(const typename Type::Bits* values, std::int64_t count) {
  typename Type::Pattern largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    const auto pattern = static_cast<typename Type::Pattern>(values[i] & Type::kAbs);
    largest = pattern > largest ? pattern : largest;
  }
  return Type::widen(static_cast<std::uint32_t>(largest));
}

#ifdef ZCOMM_LANES
template <class Type>
ZCOMM_INLINE Register magnitudes(const typename Type::Bits* values) {
  return reinterpret_cast<Register>(reinterpret_cast<typename Type::Patterns>(load_register(values)) & Type::kAbs);
}
#endif

// Returns the largest magnitude as float32 bits. A nonzero kAhead prefetches values that many bytes ahead.
template <class Type, std::int64_t kAhead = 0>
ZCOMM_INLINE std::uint32_t absmax(const typename Type::Bits* values, std::int64_t count) {
#ifdef ZCOMM_LANES
  using Patterns = typename Type::Patterns;
  constexpr std::int64_t kStep = sizeof(Register) / sizeof(typename Type::Bits);
  Register of_even = {}, of_odd = {};
  std::int64_t done = 0;
  for (; done + 2 * kStep <= count; done += 2 * kStep) {
    if constexpr (kAhead != 0) prefetch(values + done, kAhead, 2 * sizeof(Register));
    of_even = larger<Patterns>(of_even, magnitudes<Type>(values + done));
    of_odd = larger<Patterns>(of_odd, magnitudes<Type>(values + done + kStep));
  }
  if (done + kStep <= count) {
    if constexpr (kAhead != 0) prefetch(values + done, kAhead, sizeof(Register));
    of_even = larger<Patterns>(of_even, magnitudes<Type>(values + done));
    done += kStep;
  }
  of_even = larger<Patterns>(of_even, of_odd);
  const std::uint32_t largest =
      Type::widen(static_cast<std::uint32_t>(largest_lane(of_even, typename Type::Pattern{})));
  if (done == count) return largest;
  const std::uint32_t of_rest = absmax_rest<Type>(values + done, count - done);
  return of_rest > largest ? of_rest : largest;
#else
  if constexpr (kAhead != 0) prefetch(values, kAhead, count * static_cast<std::int64_t>(sizeof(*values)));
  return absmax_rest<Type>(values, count);
#endif
}

#include "codec/cpu/rotate.inl"

constexpr std::int64_t kMaxBlocks = kTileElements / 32;  // per tile

#include "codec/cpu/eden.inl"

// Computes scales and reciprocals of blocks from their largest magnitudes, given as float32 bits. The reciprocal of a
// block with a NaN or infinity is 0. No other reciprocal is 0: scales are finite, as max_code is 7 or more.
//
// Codes need no clamp: with e = 2^-24, the scale is at least (absmax / max_code) * (1 - e) and its reciprocal at most
// (1 / scale) * (1 + e). So |x * reciprocal|, rounded, is at most max_code * (1 + e)^2 / (1 - e) < max_code + 0.5.
// Below the normal range errors are not relative, but kMinScale >= absmax / max_code and its reciprocal is exact.
ZCOMM_INLINE void make_scales(const std::uint32_t* largest, std::int64_t num_blocks, float max_code, Word16* scales,
                              float* reciprocals) {
#pragma omp simd
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const bool finite = largest[i] < kInfinity32;
    const float quotient = float_of(finite ? largest[i] : 0u) / max_code;
    const float rounded_up = float_of((bits_of(quotient) + 0xffffu) & 0xffff0000u);
    const float scale = rounded_up > kMinScale ? rounded_up : kMinScale;
    const float reciprocal = 1.0f / scale;
    scales[i] = finite ? static_cast<std::uint16_t>(bits_of(scale) >> 16) : Bfloat16::kNan;
    reciprocals[i] = finite ? reciprocal : 0.0f;
  }
}

ZCOMM_INLINE std::uint32_t quantized(std::uint32_t value_bits, float reciprocal) {
  const float scaled = float_of(value_bits) * reciprocal;
  return bits_of(scaled + kRoundToInteger);
}

// Writes one code per byte. Takes 16-bit values in pairs, as little-endian 32-bit words, which halves the shuffles.
template <class Type>
ZCOMM_INLINE void quantize_bytes(const typename Type::Bits* values, std::int64_t count, float reciprocal,
                                 std::uint8_t* codes) {
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

// Quantizes the elements that the fast loop skips: the end of a block, or a whole block without a reciprocal.
template <class Type, bool kNibbles>
__attribute__((noinline)) void quantize_rest(const typename Type::Bits* values, std::int64_t count, float reciprocal,
                                             std::uint8_t* codes) {
  if (reciprocal == 0.0f) {
    __builtin_memset(codes, 0, static_cast<std::size_t>(kNibbles ? (count + 1) / 2 : count));
  } else if constexpr (kNibbles) {
    alignas(64) std::uint8_t bytes[kGroup] = {};
    quantize_bytes<Type>(values, count, reciprocal, bytes);
    gather4(reinterpret_cast<const Word16*>(bytes), count, codes);
  } else {
    quantize_bytes<Type>(values, count, reciprocal, codes);
  }
}

#ifdef ZCOMM_LANES
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void quantize_group(const typename Type::Bits* values, Floats factor, std::uint8_t* codes) {
  constexpr bool kPairs = requires { &Type::widen_pairs; };
  Group group;
  for (int i = 0; i < kGroupRegisters; i += 2) {
    if constexpr (kPairs) {
      Type::widen_pairs(values + i * ZCOMM_LANES, group[i], group[i + 1]);
    } else {
      group[i] = Type::widen_lanes(values + i * ZCOMM_LANES);
      group[i + 1] = Type::widen_lanes(values + (i + 1) * ZCOMM_LANES);
    }
  }
  for (Floats& floats : group) floats *= factor;
  if constexpr (kNibbles) {
    const auto bytes = kPairs ? pairs_to_nibbles(group) : to_nibbles(to_codes(group));
    write<kStream>(codes, bytes);
  } else {
    const auto bytes = kPairs ? pairs_to_codes(group) : to_codes(group);
    write<kStream>(codes, bytes);
  }
}
#endif

// Quantizes a block. kNibbles: two codes per byte. kStream: past the caches; `codes` is aligned to 32 (nibbles: 16).
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void quantize(const typename Type::Bits* values, std::int64_t count, float reciprocal,
                           std::uint8_t* codes) {
  std::int64_t done = 0;
#ifdef ZCOMM_LANES
  const Floats factor = broadcast(reciprocal);
  const std::int64_t in_groups = reciprocal == 0.0f ? 0 : count / kGroup * kGroup;
  for (; done < in_groups; done += kGroup) {
    quantize_group<Type, kNibbles, kStream>(values + done, factor, codes + (kNibbles ? done / 2 : done));
  }
  if (done == count) return;
#endif
  quantize_rest<Type, kNibbles>(values + done, count - done, reciprocal, codes + (kNibbles ? done / 2 : done));
}

// Quantizes a whole block and returns the largest magnitude of another one, `next`, as float32 bits. On AVX-512 one
// loop does both for 16-bit values: 13.8 GB/s for float16, against 11.8 for two loops. Elsewhere two are faster.
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE std::uint32_t quantize_and_look(const typename Type::Bits* values, const typename Type::Bits* next,
                                             std::int64_t count, float reciprocal, std::uint8_t* codes) {
#ifdef __AVX512F__
  if constexpr (sizeof(Register) == kGroup * sizeof(typename Type::Bits)) {
    // Needs no case for a reciprocal of 0: non-finite products become the integer -2^31, whose low bits are 0.
    const Floats factor = broadcast(reciprocal);
    Register largest = {};
    for (std::int64_t i = 0; i < count; i += kGroup) {
      prefetch(next + i, kEncodeAhead, sizeof(Register));
      largest = larger<typename Type::Patterns>(largest, magnitudes<Type>(next + i));
      quantize_group<Type, kNibbles, kStream>(values + i, factor, codes + (kNibbles ? i / 2 : i));
    }
    return Type::widen(static_cast<std::uint32_t>(largest_lane(largest, typename Type::Pattern{})));
  }
#endif
  const std::uint32_t largest_of_next = absmax<Type, kEncodeAhead>(next, count);
  quantize<Type, kNibbles, kStream>(values, count, reciprocal, codes);
  return largest_of_next;
}

// Encodes one tile; `largest` holds the largest magnitude of each block as float32 bits. Calls quantize_block(values,
// count, first, reciprocal, codes) per block; `first` is the index of its first element. With kNibbles quantize_block
// writes packed int4 codes, otherwise one code per byte.
template <class Type, bool kNibbles, class Quantize>
ZCOMM_INLINE void encode_blocks(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                                const std::uint32_t* largest, std::byte* scales, std::byte* codes,
                                const Quantize& quantize_block) {
  float reciprocals[kMaxBlocks];
  alignas(64) std::uint8_t unpacked[kNibbles ? 1 : kTileElements];
  const std::int64_t block_size = blocks.block_size;
  const std::int64_t num_blocks = (count + block_size - 1) / block_size;
  make_scales(largest, num_blocks, blocks.max_code, reinterpret_cast<Word16*>(scales), reciprocals);
  const bool is_direct = kNibbles || is_bytes(blocks.kind);
  std::uint8_t* bytes = is_direct ? reinterpret_cast<std::uint8_t*>(codes) : unpacked;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::int64_t first = i * block_size;
    quantize_block(values + first, min_of(block_size, count - first), first, reciprocals[i],
                   bytes + (kNibbles ? first / 2 : first));
  }
  if (!is_direct) pack(blocks.kind, unpacked, count, codes);
}

// Encodes with rounding to nearest. While a tile is quantized, the largest magnitudes of the next one are found, and
// the data after it is prefetched: memory is neither waited for nor idle.
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void encode_nearest(const typename Type::Bits* values, std::int64_t count, const CodedBlocks& blocks,
                                 std::byte* scales, std::byte* codes) {
  constexpr std::int64_t kBytes = sizeof(typename Type::Bits);
  const std::int64_t block_size = blocks.block_size;
  const std::int64_t tile = max_of(kEncodeTileBytes / kBytes / block_size, 1) * block_size;
  std::uint32_t largest[2][kMaxBlocks];
  const auto look_at = [&](std::int64_t first, std::uint32_t& of_block) {
    if (first < count) of_block = absmax<Type>(values + first, min_of(block_size, count - first));
  };
  for (std::int64_t i = 0; i < tile; i += block_size) look_at(i, largest[0][i / block_size]);
  int now = 0;
  for (std::int64_t i = 0; i < count; i += tile, now = 1 - now) {
    encode_blocks<Type, kNibbles>(values + i, min_of(tile, count - i), blocks, largest[now],
                                  scales + i / block_size * 2, codes + packed_bytes(blocks.kind, i),
                                  [&](const typename Type::Bits* block, std::int64_t block_count, std::int64_t first,
                                      float reciprocal, std::uint8_t* block_codes) {
                                    const std::int64_t next = i + tile + first;
                                    std::uint32_t& of_next = largest[1 - now][first / block_size];
                                    if (next + block_size <= count) {
                                      of_next = quantize_and_look<Type, kNibbles, kStream>(
                                          block, values + next, block_size, reciprocal, block_codes);
                                    } else {
                                      look_at(next, of_next);
                                      quantize<Type, kNibbles, kStream>(block, block_count, reciprocal, block_codes);
                                    }
                                  });
  }
}

template <class Type>
void encode(const std::byte* value_bytes, std::int64_t count, CodedBlocks blocks, std::byte* scales, std::byte* codes,
            bool stream) {
  const auto* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
  const std::uintptr_t alignment = has_nibbles(blocks.kind) ? 16 : 32;
  stream = stream && reinterpret_cast<std::uintptr_t>(codes) % alignment == 0;
  if (has_nibbles(blocks.kind)) {
    if (stream) return encode_nearest<Type, kTakesNibbles, true>(values, count, blocks, scales, codes);
    return encode_nearest<Type, kTakesNibbles, false>(values, count, blocks, scales, codes);
  }
  if (stream && is_bytes(blocks.kind)) return encode_nearest<Type, false, true>(values, count, blocks, scales, codes);
  encode_nearest<Type, false, false>(values, count, blocks, scales, codes);
}

// Rounds stochastically with 16 random bits per value. The sum with a value needs a clamp: see make_scales.
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
void encode_tile(const std::byte* value_bytes, std::int64_t count, CodedBlocks blocks, std::uint64_t seed,
                 std::int64_t first_element, std::byte* scales, std::byte* codes) {
  const auto* values = reinterpret_cast<const typename Type::Bits*>(value_bytes);
  std::uint32_t largest[kMaxBlocks];
  alignas(64) float widened[kTileElements];
  const Word32* bits = reinterpret_cast<const Word32*>(widened);
  widen_blocks<Type>(values, count, blocks, widened, largest);
  switch (blocks.kind) {
    case ElementKind::eden2:
      return encode_eden<2>(kEden2, bits, count, blocks, largest, scales, codes);
    case ElementKind::eden3:
      return encode_eden<3>(kEden3, bits, count, blocks, largest, scales, codes);
    case ElementKind::eden4:
      return encode_eden<4>(kEden4, bits, count, blocks, largest, scales, codes);
    default:  // fp8, or rounded stochastically
      break;
  }
  alignas(64) Word16 numbers[kTileElements + sizeof(Calls)];
  if (blocks.stochastic) random_bits(seed, first_element, count, numbers);
  encode_blocks<Float32, false>(bits, count, blocks, largest, scales, codes,
                                [&](const Word32* block, std::int64_t block_count, std::int64_t first, float reciprocal,
                                    std::uint8_t* block_codes) {
                                  if (reciprocal == 0.0f) {
                                    __builtin_memset(block_codes, 0, static_cast<std::size_t>(block_count));
                                  } else if (blocks.stochastic) {
                                    quantize_stochastic(block, numbers + first, block_count, reciprocal,
                                                        blocks.max_code, block_codes);
                                  } else {
                                    quantize_e4m3(block, block_count, reciprocal, block_codes);
                                  }
                                });
}
