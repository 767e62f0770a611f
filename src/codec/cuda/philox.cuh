// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11).
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

// Returns the 16 random bits of each of 16 elements, two in a word, the first in its low half. `element` is the index
// of the first one, a multiple of 16.
ZCOMM_DEVICE void random_bits(std::uint64_t seed, std::uint64_t element, std::uint32_t (&bits)[kGroup / 2]) {
#pragma unroll
  for (int call = 0; call < 2; ++call) {
    const std::uint64_t counter = element / 8 + static_cast<std::uint64_t>(call);
    std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
    std::uint32_t c2 = 0, c3 = 0;
    std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const std::uint32_t high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
      const std::uint32_t high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
      c0 = high1 ^ c1 ^ key0, c1 = low1;
      c2 = high0 ^ c3 ^ key1, c3 = low0;
      key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
    }
    bits[4 * call] = c0, bits[4 * call + 1] = c1, bits[4 * call + 2] = c2, bits[4 * call + 3] = c3;
  }
}

}  // namespace zcomm::gpu
