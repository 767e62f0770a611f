// Vector registers and groups of 32 elements in them, for the loops where GCC 12's vectorizer falls short: it widens
// bytes in steps, with three shuffles instead of one, and does not know the float16 conversions. Without ZCOMM_LANES
// the loops are plain.
//
// Each instruction set defines ZCOMM_LANES, the floats of a register, and
//   load_codes         loads the codes of 32 elements; nibbles come as pairs of registers: even elements, then odd ones
//   largest_lane       largest lane of a register without negative lanes; the type of the last argument selects
//   deinterleave       the inverse of interleave
//   to_codes           rounds 32 floats to nearest even, as bytes
//   pairs_to_codes     does so for alternating registers of even and odd elements; pairs_to_nibbles: two per byte
//   to_nibbles         packs codes, one per byte, into nibbles, two per byte: bits 0 to 3
//   upper_halves       narrows two registers of 32-bit words to their upper 16 bits
//   to_halves          rounds two registers to float16

// Reads memory of any type.
template <class Vector>
ZCOMM_INLINE Vector read(const void* data) {
  Vector vector;
  __builtin_memcpy(&vector, data, sizeof(vector));
  return vector;
}

#if defined(__AVX512F__)
using Ints = std::int32_t __attribute__((vector_size(64)));
#include "codec/cpu/lanes_avx512.inl"
#elif defined(__AVX2__)
using Ints = std::int32_t __attribute__((vector_size(32)));
#include "codec/cpu/lanes_avx2.inl"
#elif defined(ZCOMM_NEON)
using Ints = std::int32_t __attribute__((vector_size(16)));
#include "codec/cpu/lanes_neon.inl"
#endif

constexpr std::int64_t kGroup = 32;

#ifdef ZCOMM_LANES
constexpr int kGroupRegisters = kGroup / ZCOMM_LANES;
using Group = Floats[kGroupRegisters];
using LaneIndexes = std::make_index_sequence<ZCOMM_LANES>;

ZCOMM_INLINE Floats load(const float* values) { return read<Floats>(values); }
ZCOMM_INLINE void store(float* values, Floats floats) { __builtin_memcpy(values, &floats, sizeof(floats)); }
ZCOMM_INLINE Register load_register(const void* data) { return read<Register>(data); }

ZCOMM_INLINE Floats canonical_nan(Floats floats) { return floats == floats ? floats : broadcast(float_of(kNan32)); }

// Returns the larger lanes of two registers: Patterns has int32 or int16.
template <class Patterns>
ZCOMM_INLINE Register larger(Register a, Register b) {
  const Patterns first = reinterpret_cast<Patterns>(a), second = reinterpret_cast<Patterns>(b);
  return reinterpret_cast<Register>(first > second ? first : second);
}

// Turns registers of even and odd elements into the first and the second half, in order.
template <std::size_t... kLane>
ZCOMM_INLINE void interleave(Floats& even, Floats& odd, std::index_sequence<kLane...>) {
  const Floats low = __builtin_shufflevector(even, odd, (kLane / 2 + kLane % 2 * ZCOMM_LANES)...);
  odd = __builtin_shufflevector(even, odd, (ZCOMM_LANES / 2 + kLane / 2 + kLane % 2 * ZCOMM_LANES)...);
  even = low;
}

// Swaps lanes kStep apart.
template <std::size_t kStep, std::size_t... kLane>
ZCOMM_INLINE Floats swapped(Floats floats, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(floats, floats, (kLane ^ kStep)...);
}

// Returns the larger of two magnitudes; `largest` has no sign bits. NaN counts as larger than all numbers.
ZCOMM_INLINE Floats larger_magnitude(Floats largest, Floats floats) {
  const Ints magnitude = reinterpret_cast<Ints>(floats) & static_cast<std::int32_t>(kAbs32);
  return reinterpret_cast<Floats>(
      larger<Ints>(reinterpret_cast<Register>(largest), reinterpret_cast<Register>(magnitude)));
}

template <bool kNibbles>
ZCOMM_INLINE void to_order(Group& group) {
  if constexpr (!kNibbles) return;
  for (int i = 0; i < kGroupRegisters; i += 2) interleave(group[i], group[i + 1], LaneIndexes{});
}
template <bool kNibbles>
ZCOMM_INLINE void from_order(Group& group) {
  if constexpr (!kNibbles) return;
  for (int i = 0; i < kGroupRegisters; i += 2) deinterleave(group[i], group[i + 1]);
}

template <bool kStream, class Vector>
ZCOMM_INLINE void write(void* data, Vector bits) {
  if constexpr (kStream) {
    write_past_caches(data, bits);
  } else {
    __builtin_memcpy(data, &bits, sizeof(bits));
  }
}

// Stores a rounded group; NaNs are canonical. kStream: past the caches, to an address that is aligned to 64.
template <class Type, bool kStream>
ZCOMM_INLINE void store_group(const Group& group, typename Type::Bits* values) {
  if constexpr (sizeof(typename Type::Bits) == 4) {
    for (int i = 0; i < kGroupRegisters; ++i)
      write<kStream>(values + i * ZCOMM_LANES, reinterpret_cast<Register>(group[i]));
  } else {
    for (int i = 0; i < kGroupRegisters; i += 2)
      write<kStream>(values + i * ZCOMM_LANES, Type::narrow_lanes(group[i], group[i + 1]));
  }
}

// Stores a group that load_codes gave. Nibbles are not in order: joining pairs in words takes fewer shuffles than
// sorting them.
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void store_decoded(Group& group, typename Type::Bits* values) {
  if constexpr (kNibbles && requires { &Type::narrow_pairs; }) {
    for (int i = 0; i < kGroupRegisters; i += 2) {
      write<kStream>(values + i * ZCOMM_LANES, Type::narrow_pairs(group[i], group[i + 1]));
    }
  } else {
    to_order<kNibbles>(group);
    store_group<Type, kStream>(group, values);
  }
}
#endif
