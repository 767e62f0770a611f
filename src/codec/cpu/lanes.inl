// Vector registers and groups of 32 elements in them, for the loops where GCC 12's vectorizer falls short: it widens
// bytes in steps, with three shuffles instead of one, and does not know the float16 conversions. Without ZCOMM_LANES
// the loops are plain.
//
// Each instruction set defines ZCOMM_LANES, the floats of a register, and
//   load_codes         loads ZCOMM_LANES bytes as integers
//   larger             larger of two registers of int32 or int16; the type of the last argument selects
//   interleave         registers of even and odd elements become the first and the second half, in order;
//                      deinterleave is the inverse
//   to_codes           rounds 32 floats to nearest even, as bytes
//   pairs_to_codes     does so for alternating registers of even and odd elements; pairs_to_nibbles: two per byte
//   narrow_words       narrows two registers of 32-bit words below 2^16 to 16 bits
//   to_halves          rounds two registers to float16

#if defined(__AVX512F__)
using Ints = std::int32_t __attribute__((vector_size(64)));
#include "codec/cpu/lanes_avx512.inl"
#elif defined(__AVX2__)
using Ints = std::int32_t __attribute__((vector_size(32)));
#include "codec/cpu/lanes_avx2.inl"
#endif

constexpr std::int64_t kGroup = 32;

#ifdef ZCOMM_LANES
constexpr int kGroupRegisters = kGroup / ZCOMM_LANES;
using Group = Floats[kGroupRegisters];

// Returns the larger of two magnitudes; `largest` has no sign bits. NaN counts as larger than all numbers.
ZCOMM_INLINE Floats larger_magnitude(Floats largest, Floats floats) {
  const Ints magnitude = reinterpret_cast<Ints>(floats) & static_cast<std::int32_t>(kAbs32);
  return reinterpret_cast<Floats>(
      larger(reinterpret_cast<Register>(largest), reinterpret_cast<Register>(magnitude), std::int32_t{}));
}

// Returns the largest lane of a register without negative lanes.
ZCOMM_INLINE std::int32_t largest_lane(Register bits, std::int32_t) {
  const __m256i both = _mm256_max_epi32(lower_half(bits), upper_half(bits));
  __m128i lanes = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  lanes = _mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0xb1)));
}
ZCOMM_INLINE std::int32_t largest_lane(Register bits, std::int16_t) {
  const __m256i both = _mm256_max_epi16(lower_half(bits), upper_half(bits));
  const __m128i lanes = _mm_max_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i inverted = _mm_xor_si128(lanes, _mm_set1_epi16(-1));  // the instruction finds only a minimum
  return static_cast<std::uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)));
}

// Packs codes, one per byte, into nibbles, two per byte: bits 0 to 3.
ZCOMM_INLINE __m128i to_nibbles(__m256i codes) {
  const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(0x0f));
  const __m256i pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x1001));
  return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

// Loads the codes of 32 elements. Nibbles come as pairs of registers: even elements, then odd ones.
template <bool kNibbles>
ZCOMM_INLINE void load_codes(const std::int8_t* codes, Group& group) {
  for (int i = 0; i < kGroupRegisters; i += 2) {
    if constexpr (kNibbles) {
      const Ints pairs = load_codes(codes + i / 2 * ZCOMM_LANES);
      group[i] = to_floats((pairs << 28) >> 28);
      group[i + 1] = to_floats(pairs >> 4);
    } else {
      group[i] = to_floats(load_codes(codes + i * ZCOMM_LANES));
      group[i + 1] = to_floats(load_codes(codes + (i + 1) * ZCOMM_LANES));
    }
  }
}

template <bool kNibbles>
ZCOMM_INLINE void to_order(Group& group) {
  if constexpr (!kNibbles) return;
  for (int i = 0; i < kGroupRegisters; i += 2) interleave(group[i], group[i + 1]);
}
template <bool kNibbles>
ZCOMM_INLINE void from_order(Group& group) {
  if constexpr (!kNibbles) return;
  for (int i = 0; i < kGroupRegisters; i += 2) deinterleave(group[i], group[i + 1]);
}

template <bool kStream>
ZCOMM_INLINE void write_register(void* data, Register bits) {
  if constexpr (kStream) {
    stream_register(data, bits);
  } else {
    store_register(data, bits);
  }
}

template <bool kStream>
ZCOMM_INLINE void write_16_bytes(void* data, __m128i bytes) {
  if constexpr (kStream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(data), bytes);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), bytes);
  }
}

template <bool kStream>
ZCOMM_INLINE void write_32_bytes(void* data, __m256i bytes) {
  if constexpr (kStream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(data), bytes);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), bytes);
  }
}

// Stores a rounded group; NaNs are canonical. kStream: past the caches, to an address that is aligned to 64.
template <class Type, bool kStream>
ZCOMM_INLINE void store_group(const Group& group, typename Type::Bits* values) {
  if constexpr (sizeof(typename Type::Bits) == 4) {
    for (int i = 0; i < kGroupRegisters; ++i)
      write_register<kStream>(values + i * ZCOMM_LANES, reinterpret_cast<Register>(group[i]));
  } else {
    for (int i = 0; i < kGroupRegisters; i += 2)
      write_register<kStream>(values + i * ZCOMM_LANES, Type::narrow_lanes(group[i], group[i + 1]));
  }
}

// Stores a group that load_codes gave. Nibbles are not in order: joining pairs in words takes fewer shuffles than
// sorting them.
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void store_decoded(Group& group, typename Type::Bits* values) {
  if constexpr (kNibbles && requires { &Type::narrow_pairs; }) {
    for (int i = 0; i < kGroupRegisters; i += 2) {
      write_register<kStream>(values + i * ZCOMM_LANES, Type::narrow_pairs(group[i], group[i + 1]));
    }
  } else {
    to_order<kNibbles>(group);
    store_group<Type, kStream>(group, values);
  }
}
#endif
