// Codes: the part of kernels.inl that converts between packed codes and one code per byte (two's complement or e4m3).

// Spreads eight codes of 3 bits from a little-endian word, whose upper 40 bits may be any. A Word is one or a vector.
template <class Word>
ZCOMM_INLINE Word spread3(Word word) {
  word = (word & 0xfffu) | ((word << 20) & 0xfff00000000u);
  word = (word & 0x3f0000003fu) | ((word << 10) & 0x3f0000003f0000u);
  return (word & 0x7000700070007u) | ((word << 5) & 0x700070007000700u);
}
template <class Word>
ZCOMM_INLINE Word gather3(Word codes) {
  codes &= 0x707070707070707u;
  codes = (codes | (codes >> 5)) & 0x3f003f003f003fu;
  codes = (codes | (codes >> 10)) & 0xfff00000fffu;
  return (codes | (codes >> 20)) & 0xffffffu;
}

#if defined(__SSSE3__) || defined(ZCOMM_NEON)
#define ZCOMM_SHUFFLES_BYTES
using Bytes16 = std::uint8_t __attribute__((vector_size(16)));
using Longs16 = std::uint64_t __attribute__((vector_size(16)));

// Returns bytes[indexes[i]] in lane i; indexes are below 16.
ZCOMM_INLINE Bytes16 shuffled(Bytes16 bytes, Bytes16 indexes) {
#ifdef ZCOMM_NEON
  return reinterpret_cast<Bytes16>(
      vqtbl1q_u8(reinterpret_cast<uint8x16_t>(bytes), reinterpret_cast<uint8x16_t>(indexes)));
#else
  return reinterpret_cast<Bytes16>(
      _mm_shuffle_epi8(reinterpret_cast<__m128i>(bytes), reinterpret_cast<__m128i>(indexes)));
#endif
}
#endif

// Converts all codes between the wire and bytes whose upper bits are zero. Accesses only those bytes of a wire that
// hold codes. Of the tile, up to seven bytes past `count` are read and written.

ZCOMM_INLINE void spread3(const unsigned char* codes, std::int64_t count, unsigned char* tile) {
  std::int64_t done = 0;  // codes
#ifdef ZCOMM_SHUFFLES_BYTES
  for (; done + 22 <= count; done += 16) {  // reads 8 bytes, uses 6
    Bytes16 bytes = {};
    __builtin_memcpy(&bytes, codes + done / 8 * 3, 8);
    bytes = __builtin_shufflevector(bytes, bytes, 0, 1, 2, 15, 15, 15, 15, 15, 3, 4, 5, 15, 15, 15, 15, 15);
    const Longs16 words = spread3(reinterpret_cast<Longs16>(bytes));
    __builtin_memcpy(tile + done, &words, sizeof(words));
  }
#endif
  const std::int64_t num_bytes = (count * 3 + 7) / 8;
  for (std::int64_t byte = done / 8 * 3; done < count; done += 8, byte += 3) {
    std::uint64_t word = 0;
    for (std::int64_t i = 0; i < min_of(3, num_bytes - byte); ++i) word |= std::uint64_t{codes[byte + i]} << (8 * i);
    word = spread3(word);
    __builtin_memcpy(tile + done, &word, sizeof(word));
  }
}

ZCOMM_INLINE void gather3(const unsigned char* tile, std::int64_t count, unsigned char* codes) {
  std::int64_t done = 0;
#ifdef ZCOMM_SHUFFLES_BYTES
  for (; done + 22 <= count; done += 16) {  // writes 8 bytes; the next round overwrites the last 2
    Longs16 words;
    __builtin_memcpy(&words, tile + done, sizeof(words));
    Bytes16 bytes = reinterpret_cast<Bytes16>(gather3(words));
    bytes = __builtin_shufflevector(bytes, bytes, 0, 1, 2, 8, 9, 10, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3);
    __builtin_memcpy(codes + done / 8 * 3, &bytes, 8);
  }
#endif
  const std::int64_t num_bytes = (count * 3 + 7) / 8;
  for (std::int64_t byte = done / 8 * 3; done < count; done += 8, byte += 3) {
    std::uint64_t word;
    __builtin_memcpy(&word, tile + done, sizeof(word));
    word = gather3(word);
    for (std::int64_t i = 0; i < min_of(3, num_bytes - byte); ++i) {
      codes[byte + i] = static_cast<unsigned char>(word >> (8 * i));
    }
  }
}

// Handles a pair of codes of 4 bits as one little-endian 16-bit word.
ZCOMM_INLINE void spread4(const unsigned char* codes, std::int64_t count, Word16* pairs) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
    const unsigned byte = codes[i];
    pairs[i] = static_cast<std::uint16_t>((byte | (byte << 4)) & 0x0f0fu);
  }
}
ZCOMM_INLINE void gather4(const Word16* pairs, std::int64_t count, unsigned char* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
    const unsigned pair = pairs[i];
    codes[i] = static_cast<unsigned char>((pair & 0x0fu) | ((pair >> 4) & 0xf0u));
  }
}

// Handles four codes of 2 bits as one 32-bit word.
ZCOMM_INLINE void spread2(const unsigned char* codes, std::int64_t count, Word32* quads) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 3) / 4; ++i) {
    const std::uint32_t byte = codes[i];
    quads[i] = (byte | (byte << 6) | (byte << 12) | (byte << 18)) & 0x03030303u;
  }
}
ZCOMM_INLINE void gather2(const Word32* quads, std::int64_t count, unsigned char* codes) {
#pragma omp simd
  for (std::int64_t i = 0; i < (count + 3) / 4; ++i) {
    const std::uint32_t quad = quads[i] & 0x03030303u;
    codes[i] = static_cast<unsigned char>(quad | (quad >> 6) | (quad >> 12) | (quad >> 18));
  }
}

// Magnitudes that the codes of EDEN stand for, as integers: 46 times the centroids of a standard normal (Max,
// "Quantizing for minimum distortion", 1960). A code's upper bit is its sign.
struct EdenLevels {
  std::int16_t of[8];
};
constexpr EdenLevels kEden2{{21, 69}}, kEden3{{11, 35, 62, 99}}, kEden4{{6, 18, 30, 43, 58, 74, 95, 126}};

// Replaces codes of EDEN, of at most 4 bits, by what they stand for.
template <int kBits>
ZCOMM_INLINE void look_up(const EdenLevels& levels, std::int64_t count, std::int8_t* codes) {
  constexpr int kLevels = 1 << (kBits - 1);
  alignas(16) std::int8_t table[16];
  for (int i = 0; i < 2 * kLevels; ++i) {
    table[i] = static_cast<std::int8_t>(i < kLevels ? levels.of[i] : -levels.of[i - kLevels]);
  }
  std::int64_t done = 0;
#ifdef ZCOMM_SHUFFLES_BYTES
  const Bytes16 values = read<Bytes16>(table);
  for (; done + 16 <= count; done += 16) {
    const Bytes16 bytes = shuffled(values, read<Bytes16>(codes + done));
    __builtin_memcpy(codes + done, &bytes, sizeof(bytes));
  }
#endif
  for (; done < count; ++done) codes[done] = table[codes[done]];
}

// Returns one code per byte: the wire's own bytes, or `room` (a tile) if codes are packed. Codes of EDEN are replaced
// by what they stand for.
ZCOMM_INLINE const std::int8_t* unpack(ElementKind kind, const std::byte* codes, std::int64_t count,
                                       std::int8_t* room) {
  const unsigned char* packed = reinterpret_cast<const unsigned char*>(codes);
  switch (kind) {
    case ElementKind::exact:
    case ElementKind::bf16:
    case ElementKind::int8:
    case ElementKind::fp8:
      return reinterpret_cast<const std::int8_t*>(codes);
    case ElementKind::int4:
      spread4(packed, count, reinterpret_cast<Word16*>(room));
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) room[i] = static_cast<std::int8_t>((room[i] ^ 8) - 8);
      return room;
    case ElementKind::eden2:
      spread2(packed, count, reinterpret_cast<Word32*>(room));
      return look_up<2>(kEden2, count, room), room;
    case ElementKind::eden3:
      spread3(packed, count, reinterpret_cast<unsigned char*>(room));
      return look_up<3>(kEden3, count, room), room;
    case ElementKind::eden4:
      spread4(packed, count, reinterpret_cast<Word16*>(room));
      return look_up<4>(kEden4, count, room), room;
  }
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
  for (std::int64_t i = count; i % 8 != 0; ++i) tile[i] = 0;
  switch (kind) {
    case ElementKind::exact:
    case ElementKind::bf16:
    case ElementKind::int8:
    case ElementKind::fp8:
      return;  // is_bytes: codes were written in place
    case ElementKind::int4:
    case ElementKind::eden4:
      return gather4(reinterpret_cast<const Word16*>(tile), count, packed);
    case ElementKind::eden2:
      return gather2(reinterpret_cast<const Word32*>(tile), count, packed);
    case ElementKind::eden3:
      return gather3(tile, count, packed);
  }
}

// Returns the bytes of `count` codes; `count` is a multiple of 32.
ZCOMM_INLINE std::int64_t packed_bytes(ElementKind kind, std::int64_t count) {
  constexpr std::int64_t kBits[] = {0, 0, 8, 4, 8, 2, 3, 4};
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
