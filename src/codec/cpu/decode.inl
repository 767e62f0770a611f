// Decodes scales and codes to values, and to terms of sums. Part of kernels.inl.

ZCOMM_INLINE float scale_of(Word16 bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

// Keeps NaN.
ZCOMM_INLINE float clamp(float value, float limit) {
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

// Codes and scales of up to one tile of a wire, from element `begin` on.
struct Tile {
  // Takes codes as packed on the wire, or unpacks them into `room` (a tile), one per byte.
  ZCOMM_INLINE Tile of(const CodedBlocks& wire, std::int64_t begin, std::int64_t count, std::int8_t* room) {
    const std::byte* packed = wire.codes + packed_bytes(wire.kind, begin);
    const std::int8_t* codes =
        room == nullptr ? reinterpret_cast<const std::int8_t*>(packed) : unpack(wire.kind, packed, count, room);
    return {codes, reinterpret_cast<const Word16*>(wire.scales) + begin / wire.block_size};
  }

  const std::int8_t* codes;
  const Word16* scales;
};

// Decodes part of a block that the fast loops cannot: values may exceed +-limit or be NaN, or the tensor ends.
template <class Type, bool kNibbles>
__attribute__((noinline)) void dequantize_rest(const std::int8_t* codes, std::int64_t count, float scale, float limit,
                                               typename Type::Bits* values) {
  alignas(64) std::int8_t room[kNibbles ? kTileElements : 1];
  if constexpr (kNibbles) codes = unpack(ElementKind::int4, reinterpret_cast<const std::byte*>(codes), count, room);
  const float finite_scale = clamp(scale, kLargestFinite);
  for (std::int64_t i = 0; i < count; ++i) {
    const float term = clamp(static_cast<float>(codes[i]) * finite_scale, limit);
    values[i] = Type::narrow(scale != scale ? float_of(kNan32) : term);
  }
}

// Decodes part of a block whose values are all finite and within the limits of their type.
#ifdef ZCOMM_LANES
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void dequantize(const std::int8_t* codes, std::int64_t count, float scale, typename Type::Bits* values) {
  const Floats factor = broadcast(scale);
  std::int64_t done = 0;
  for (; done + kGroup <= count; done += kGroup) {
    Group group;
    load_codes<kNibbles>(codes + (kNibbles ? done / 2 : done), group);
    for (Floats& floats : group) floats *= factor;
    store_decoded<Type, kNibbles, kStream>(group, values + done);
  }
  if (done != count) {
    dequantize_rest<Type, kNibbles>(codes + (kNibbles ? done / 2 : done), count - done, scale, kLargestFinite,
                                    values + done);
  }
}
#else
template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void dequantize(const std::int8_t* codes, std::int64_t count, float scale, typename Type::Bits* values) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<typename Type::Bits>(Type::narrow_finite(static_cast<float>(codes[i]) * scale));
  }
}
#endif

template <class Type, bool kNibbles, bool kStream>
ZCOMM_INLINE void decode_blocks(const CodedBlocks& wire, const Tile& tile, std::int64_t begin, std::int64_t count,
                                float limit, typename Type::Bits* values) {
  const float largest_code = wire.largest_code;  // copies: the compiler must assume that the output aliases `wire`
  const float factor = wire.factor;
  const std::int64_t block_size = wire.block_size;
  const Word16* scales = tile.scales;
  std::int64_t block_end = min_of(block_size - begin % block_size, count);
  for (std::int64_t i = 0; i < count; i = block_end, block_end = min_of(i + block_size, count)) {
    const float scale = scale_of(*scales++) * factor;
    const std::int8_t* codes = tile.codes + (kNibbles ? i / 2 : i);
    prefetch(codes, kPrefetchBytes, kNibbles ? block_size / 2 : block_size);
    if (__builtin_fabsf(scale) * largest_code <= limit) {
      dequantize<Type, kNibbles, kStream>(codes, block_end - i, scale, values + i);
    } else {
      dequantize_rest<Type, kNibbles>(codes, block_end - i, scale, limit, values + i);
    }
  }
}

// Separate from `decode`, because this buffer on its stack made int8 a fifth slower.
template <class Type, bool kStream>
__attribute__((noinline)) void decode_packed(const CodedBlocks& wire, std::int64_t begin, std::int64_t count,
                                             float limit, typename Type::Bits* values) {
  alignas(64) std::int8_t room[kTileElements];
  decode_blocks<Type, false, kStream>(wire, Tile::of(wire, begin, count, room), begin, count, limit, values);
}

template <class Type, bool kStream>
__attribute__((noinline)) void decode_fp8(const CodedBlocks& wire, std::int64_t begin, std::int64_t count, float limit,
                                          std::byte* values) {
  alignas(64) float terms[kTileElements];
  const Tile tile = Tile::of(wire, begin, count, nullptr);
  from_e4m3(tile.codes, count, terms);
  const std::int64_t block_size = wire.block_size;
  const Word16* scales = tile.scales;
  std::int64_t block_end = min_of(block_size - begin % block_size, count);
  for (std::int64_t i = 0; i < count; i = block_end, block_end = min_of(i + block_size, count)) {
    const float scale = clamp(scale_of(*scales++) * wire.factor, kLargestFinite);
#pragma omp simd
    for (std::int64_t k = i; k < block_end; ++k) {
      const float term = clamp(terms[k] * scale, limit);
      terms[k] = scale != scale ? float_of(kNan32) : term;
    }
  }
  store_values<Type, kStream>(terms, count, 1.0f, values);
}

template <class Type, bool kStream>
ZCOMM_INLINE void decode(const CodedBlocks& wire, std::int64_t begin, std::int64_t count, float limit,
                         std::byte* value_bytes) {
  typename Type::Bits* values = reinterpret_cast<typename Type::Bits*>(value_bytes);
  if (wire.kind == ElementKind::fp8) return decode_fp8<Type, kStream>(wire, begin, count, limit, value_bytes);
  if (wire.kind == ElementKind::int8) {
    decode_blocks<Type, false, kStream>(wire, Tile::of(wire, begin, count, nullptr), begin, count, limit, values);
  } else if (has_nibbles(wire.kind)) {
    decode_blocks<Type, true, kStream>(wire, Tile::of(wire, begin, count, nullptr), begin, count, limit, values);
  } else {
    decode_packed<Type, kStream>(wire, begin, count, limit, values);
  }
}

template <class Type>
void decode(CodedBlocks wire, std::int64_t begin, std::int64_t count, float limit, std::byte* values, bool stream) {
  if (stream) return decode<Type, true>(wire, begin, count, limit, values);
  decode<Type, false>(wire, begin, count, limit, values);
}
