// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11): random bits for
// kernels.inl.

// Vector of generator calls, one per 64-bit lane. Each lane holds one 32-bit word; its upper half is ignored.
#if defined(__AVX512F__)
using Calls = std::uint64_t __attribute__((vector_size(64)));
constexpr Calls kCallIndex = {0, 1, 2, 3, 4, 5, 6, 7};
ZCOMM_INLINE Calls product(Calls a, Calls b) {
  return reinterpret_cast<Calls>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
ZCOMM_INLINE Calls interleaved_low(Calls a, Calls b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
ZCOMM_INLINE Calls interleaved_high(Calls a, Calls b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#elif defined(__AVX2__)
using Calls = std::uint64_t __attribute__((vector_size(32)));
constexpr Calls kCallIndex = {0, 1, 2, 3};
ZCOMM_INLINE Calls product(Calls a, Calls b) {
  return reinterpret_cast<Calls>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
ZCOMM_INLINE Calls interleaved_low(Calls a, Calls b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
ZCOMM_INLINE Calls interleaved_high(Calls a, Calls b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
using Calls = std::uint64_t __attribute__((vector_size(16)));
constexpr Calls kCallIndex = {0, 1};
ZCOMM_INLINE Calls product(Calls a, Calls b) {
#ifdef __SSE2__
  return reinterpret_cast<Calls>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#elif defined(ZCOMM_NEON)
  return reinterpret_cast<Calls>(
      vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)), vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}
ZCOMM_INLINE Calls interleaved_low(Calls a, Calls b) { return __builtin_shufflevector(a, b, 0, 2); }
ZCOMM_INLINE Calls interleaved_high(Calls a, Calls b) { return __builtin_shufflevector(a, b, 1, 3); }
#endif
constexpr std::int64_t kCalls = sizeof(Calls) / 8;

// Fills `bits` (room for a tile and a register) for at least `count` elements of the random stream.
ZCOMM_INLINE void random_bits(std::uint64_t seed, std::int64_t first_element, std::int64_t count, Word16* bits) {
  constexpr Calls kZero = {};
  for (std::int64_t i = 0; i < count; i += kCalls * 8) {
    Calls c0 = kCallIndex + static_cast<std::uint64_t>(first_element + i) / 8, c1 = c0 >> 32, c2 = kZero, c3 = kZero;
    std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Calls product0 = product(c0, kZero + 0xd2511f53u), product1 = product(c2, kZero + 0xcd9e8d57u);
      c0 = (product1 >> 32) ^ c1 ^ (kZero + key0);
      c1 = product1;
      c2 = (product0 >> 32) ^ c3 ^ (kZero + key1);
      c3 = product0;
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
    const Calls first = (c0 & 0xffffffffu) | (c1 << 32), second = (c2 & 0xffffffffu) | (c3 << 32);
    const Calls low = interleaved_low(first, second), high = interleaved_high(first, second);
    __builtin_memcpy(bits + i, &low, sizeof(low));
    __builtin_memcpy(bits + i + kCalls * 4, &high, sizeof(high));
  }
}
