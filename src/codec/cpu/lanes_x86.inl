// Register operations for AVX2 and AVX-512, on halves and quarters of their registers: see lanes.inl.

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

ZCOMM_INLINE __m128i to_nibbles(__m256i codes) {
  const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(0x0f));
  const __m256i pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(0x1001));
  return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

template <bool kNibbles>
ZCOMM_INLINE void load_codes(const std::int8_t* codes, Floats* group) {
  for (int i = 0; i < 32 / ZCOMM_LANES; i += 2) {
    if constexpr (kNibbles) {
      const Ints pairs = load_codes(codes + i / 2 * ZCOMM_LANES);
      group[i] = __builtin_convertvector((pairs << 28) >> 28, Floats);
      group[i + 1] = __builtin_convertvector(pairs >> 4, Floats);
    } else {
      group[i] = __builtin_convertvector(load_codes(codes + i * ZCOMM_LANES), Floats);
      group[i + 1] = __builtin_convertvector(load_codes(codes + (i + 1) * ZCOMM_LANES), Floats);
    }
  }
}

ZCOMM_INLINE void write_past_caches(void* data, __m128i bits) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(data), bits);
}
ZCOMM_INLINE void write_past_caches(void* data, __m256i bits) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(data), bits);
}
