// Codes: the part of kernels.inl that converts between packed codes and one code per byte (two's complement or e4m3).

// Spreads four 6-bit codes from a little-endian word, whose upper 8 bits may be any. A Word is one word or a vector.
template <class Word>
ZCOMM_INLINE Word spread_int6(Word word) {
  return (word & 0x3fu) | ((word << 2) & 0x3f00u) | ((word << 4) & 0x3f0000u) | ((word << 6) & 0x3f000000u);
}
template <class Word>
ZCOMM_INLINE Word gather_int6(Word codes) {
  return (codes & 0x3fu) | ((codes >> 2) & 0xfc0u) | ((codes >> 4) & 0x3f000u) | ((codes >> 6) & 0xfc0000u);
}

#if defined(__SSSE3__) || defined(ZCOMM_NEON)
#define ZCOMM_SHUFFLES_BYTES
using Bytes16 = std::uint8_t __attribute__((vector_size(16)));
using Words16 = std::uint32_t __attribute__((vector_size(16)));
#endif

// Converts all codes between the wire and bytes whose upper bits are zero. Accesses only those bytes of a wire that
// hold codes. Of the tile, up to three bytes past `count` are read and written.

ZCOMM_INLINE void spread_int6(const unsigned char* codes, std::int64_t count, Word32* quads) {
  std::int64_t done = 0;  // codes
#ifdef ZCOMM_SHUFFLES_BYTES
  for (; done + 22 <= count; done += 16) {  // reads 16 bytes, uses 12
    Bytes16 bytes;
    __builtin_memcpy(&bytes, codes + done / 4 * 3, sizeof(bytes));
    bytes = __builtin_shufflevector(bytes, bytes, 0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0);
    const Words16 words = spread_int6(reinterpret_cast<Words16>(bytes));
    __builtin_memcpy(quads + done / 4, &words, sizeof(words));
  }
#endif
  const std::int64_t num_bytes = (count * 6 + 7) / 8;
  for (std::int64_t byte = done / 4 * 3; done < count; done += 4, byte += 3) {
    std::uint32_t word = 0;
    for (std::int64_t i = 0; i < min_of(3, num_bytes - byte); ++i) {
      word |= static_cast<std::uint32_t>(codes[byte + i]) << (8 * i);
    }
    quads[done / 4] = spread_int6(word);
  }
}

ZCOMM_INLINE void gather_int6(const Word32* quads, std::int64_t count, unsigned char* codes) {
  std::int64_t done = 0;
#ifdef ZCOMM_SHUFFLES_BYTES
  for (; done + 22 <= count; done += 16) {  // writes 16 bytes; the next round overwrites the last 4
    Words16 words;
    __builtin_memcpy(&words, quads + done / 4, sizeof(words));
    Bytes16 bytes = reinterpret_cast<Bytes16>(gather_int6(words));
    bytes = __builtin_shufflevector(bytes, bytes, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
    __builtin_memcpy(codes + done / 4 * 3, &bytes, sizeof(bytes));
  }
#endif
  const std::int64_t num_bytes = (count * 6 + 7) / 8;
  for (std::int64_t byte = done / 4 * 3; done < count; done += 4, byte += 3) {
    const std::uint32_t word = gather_int6(quads[done / 4]);
    for (std::int64_t i = 0; i < min_of(3, num_bytes - byte); ++i) {
      codes[byte + i] = static_cast<unsigned char>(word >> (8 * i));
    }
  }
}

// Handles a pair of int4 codes as one little-endian 16-bit word.
ZCOMM_INLINE void spread_int4(const unsigned char* codes, std::int64_t count, Word16* pairs) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
    const unsigned byte = codes[i];
    pairs[i] = static_cast<std::uint16_t>((byte | (byte << 4)) & 0x0f0fu);
  }
}
ZCOMM_INLINE void gather_int4(const Word16* pairs, std::int64_t count, unsigned char* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
    const unsigned pair = pairs[i];
    codes[i] = static_cast<unsigned char>((pair & 0x0fu) | ((pair >> 4) & 0xf0u));
  }
}

// Handles four int2 codes as one 32-bit word.
ZCOMM_INLINE void spread_int2(const unsigned char* codes, std::int64_t count, Word32* quads) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 3) / 4; ++i) {
    const std::uint32_t byte = codes[i];
    quads[i] = (byte | (byte << 6) | (byte << 12) | (byte << 18)) & 0x03030303u;
  }
}
ZCOMM_INLINE void gather_int2(const Word32* quads, std::int64_t count, unsigned char* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 3) / 4; ++i) {
    const std::uint32_t quad = quads[i] & 0x03030303u;
    codes[i] = static_cast<unsigned char>(quad | (quad >> 6) | (quad >> 12) | (quad >> 18));
  }
}

// Returns one code per byte: the wire's own bytes, or `room` (a tile) if codes are packed.
ZCOMM_INLINE const std::int8_t* unpack(ElementKind kind, const std::byte* codes, std::int64_t count,
                                       std::int8_t* room) {
  const unsigned char* packed = reinterpret_cast<const unsigned char*>(codes);
  std::int8_t sign = 0;
  switch (kind) {
    case ElementKind::exact:
    case ElementKind::bf16:
    case ElementKind::int8:
    case ElementKind::fp8:
      return reinterpret_cast<const std::int8_t*>(codes);
    case ElementKind::int6:
      spread_int6(packed, count, reinterpret_cast<Word32*>(room));
      sign = 32;
      break;
    case ElementKind::int4:
      spread_int4(packed, count, reinterpret_cast<Word16*>(room));
      sign = 8;
      break;
    case ElementKind::int2:
      spread_int2(packed, count, reinterpret_cast<Word32*>(room));
      sign = 2;
      break;
  }
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) room[i] = static_cast<std::int8_t>((room[i] ^ sign) - sign);
  return room;
}

// Tells whether the vector loops read and write codes of this kind packed, two per byte.
#ifdef ZCOMM_LANES
constexpr bool kTakesNibbles = true;
#else
constexpr bool kTakesNibbles = false;
#endif
ZCOMM_INLINE bool has_nibbles(ElementKind kind) { return kTakesNibbles && kind == ElementKind::int4; }

// Tells whether the wire has one code per byte, so that `pack` is not needed.
ZCOMM_INLINE bool is_bytes(ElementKind kind) { return kind == ElementKind::int8 || kind == ElementKind::fp8; }

// Packs a tile of one code per byte into the wire.
ZCOMM_INLINE void pack(ElementKind kind, std::uint8_t* tile, std::int64_t count, std::byte* codes) {
  unsigned char* packed = reinterpret_cast<unsigned char*>(codes);
  for (std::int64_t i = count; i % 4 != 0; ++i) tile[i] = 0;
  switch (kind) {
    case ElementKind::exact:
    case ElementKind::bf16:
    case ElementKind::int8:
    case ElementKind::fp8:
      return;  // is_bytes: codes were written in place
    case ElementKind::int6:
      return gather_int6(reinterpret_cast<const Word32*>(tile), count, packed);
    case ElementKind::int4:
      return gather_int4(reinterpret_cast<const Word16*>(tile), count, packed);
    case ElementKind::int2:
      return gather_int2(reinterpret_cast<const Word32*>(tile), count, packed);
  }
}

// Returns the bytes of `count` codes; `count` is a multiple of 32.
ZCOMM_INLINE std::int64_t packed_bytes(ElementKind kind, std::int64_t count) {
  constexpr std::int64_t kBits[] = {0, 0, 8, 6, 4, 2, 8};
  static_assert(sizeof(kBits) / sizeof(*kBits) == kNumElementKinds, "one number of bits for each kind");
  return count / 8 * kBits[static_cast<int>(kind)];
}

// --- e4m3

// Rounds to e4m3, ties to even. Magnitudes must round to 448 or less. Adding 2^14 rounds subnormals at 2^-9.
ZCOMM_INLINE std::uint8_t to_e4m3(float value) {
  const std::uint32_t magnitude = bits_of(value) & kAbs32;
  const std::uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0x1p14f) - (141u << 23);
  const std::uint32_t code = magnitude < (121u << 23) ? subnormal : normal;
  return static_cast<std::uint8_t>(code | ((bits_of(value) >> 24) & 0x80u));
}

// Decodes e4m3 by way of float16, which has one more exponent bit: the float16's value is 2^-8 times the code's.
ZCOMM_INLINE void from_e4m3(const std::int8_t* codes, std::int64_t count, float* values) {
  alignas(64) Word16 halves[kTileElements];
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const unsigned code = static_cast<std::uint8_t>(codes[i]);
    halves[i] = static_cast<std::uint16_t>(((code & 0x80u) << 8) | ((code & 0x7fu) << 7));
  }
  widen_row<Float16>(halves, count, values);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) values[i] *= 256.0f;
}
