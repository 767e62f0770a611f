// Loads and stores groups of sixteen values in memory that is aligned to a value, or to 16 bytes.
#pragma once

#include "codec/cuda/numbers.cuh"

namespace zcomm::gpu {

ZCOMM_DEVICE bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Loads and stores kWords words at an address that is aligned to 16 bytes, or for two words to 8.
template <int kWords>
ZCOMM_DEVICE void load_words(const std::byte* data, std::uint32_t (&words)[kWords]) {
  if constexpr (kWords == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(data);
    words[0] = pair.x, words[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 quad = reinterpret_cast<const uint4*>(data)[i / 4];
      words[i] = quad.x, words[i + 1] = quad.y, words[i + 2] = quad.z, words[i + 3] = quad.w;
    }
  }
}

template <int kWords>
ZCOMM_DEVICE void store_words(const std::uint32_t (&words)[kWords], std::byte* data) {
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(data) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      reinterpret_cast<uint4*>(data)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }
}

// Stores for all lanes of a warp, whose words lie `lane_bytes` apart. A lane alone would write half of a 32-byte
// sector, which costs as much as a whole one. Two neighbors exchange halves and write whole sectors.
template <int kWords>
ZCOMM_DEVICE void store_words_in_pairs(const std::uint32_t (&words)[kWords], std::byte* data,
                                       std::uint32_t lane_bytes) {
  const bool is_odd = threadIdx.x % 2 == 1;
  std::byte* const first = is_odd ? data - lane_bytes + 16 : data;
#pragma unroll
  for (int i = 0; i < kWords; i += 8) {
    std::uint32_t of_even[4], of_odd[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t near = words[i + k], far = words[i + 4 + k];
      const std::uint32_t received = __shfl_xor_sync(0xffffffffu, is_odd ? near : far, 1);
      of_even[k] = is_odd ? received : near;
      of_odd[k] = is_odd ? far : received;
    }
    store_words(of_even, first + i * 4);
    store_words(of_odd, first + lane_bytes + i * 4);
  }
}

// Extracts the kWords words that begin `offset` bytes into a window; offset < 16.
template <int kWords>
ZCOMM_DEVICE void cut_window(std::uint32_t (&window)[kWords + 4], std::uint32_t offset,
                             std::uint32_t (&words)[kWords]) {
  if (offset & 8) {
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) window[i] = window[i + 2];
  }
  if (offset & 4) {
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) window[i] = window[i + 1];
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __funnelshift_r(window[i], window[i + 1], offset % 4 * 8);
}

template <class Type>
ZCOMM_DEVICE std::uint32_t load_value(const std::byte* value) {
  if constexpr (Type::kBytes == 4) {
    return *reinterpret_cast<const std::uint32_t*>(value);
  } else {
    return *reinterpret_cast<const std::uint16_t*>(value);
  }
}

// Loads values [begin, begin + 16) of `count`, with zeros from `count` on.
template <class Type>
ZCOMM_DEVICE void load_group(const std::byte* values, std::uint32_t begin, std::uint32_t count,
                             std::uint32_t (&words)[Type::kWords]) {
  const std::byte* data = values + begin * Type::kBytes;
  if (begin + kGroup <= count && is_aligned(values)) {
    load_words(data, words);
    return;
  }
  // Reads aligned 16-byte words around the group, which are values, too. Other threads may be writing to them if a sum
  // replaces these values: bytes outside the group are discarded.
  if (begin > 0 && begin + 2 * kGroup <= count) {
    std::uint32_t window[Type::kWords + 4];
    const auto offset = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(data) % 16);
    load_words(data - offset, window);
    cut_window(window, offset, words);
    return;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < Type::kWords; ++i) {
    if constexpr (Type::kBytes == 4) {
      words[i] = begin + i < count ? load_value<Type>(data + i * 4) : 0;
    } else {
      const std::uint32_t low = begin + 2 * i < count ? load_value<Type>(data + i * 4) : 0;
      const std::uint32_t high = begin + 2 * i + 1 < count ? load_value<Type>(data + i * 4 + 2) : 0;
      words[i] = low | (high << 16);
    }
  }
}

// Stores a group, but no value from `count` on.
template <class Type>
ZCOMM_DEVICE void store_group(const std::uint32_t (&words)[Type::kWords], std::uint32_t begin, std::uint32_t count,
                              std::byte* values) {
  std::byte* data = values + begin * Type::kBytes;
  if (begin + kGroup <= count && is_aligned(values)) {
    store_words(words, data);
    return;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < Type::kWords; ++i) {
    if constexpr (Type::kBytes == 4) {
      if (begin + i < count) *reinterpret_cast<std::uint32_t*>(data + i * 4) = words[i];
    } else {
      std::uint16_t* pair = reinterpret_cast<std::uint16_t*>(data + i * 4);
      if (begin + 2 * i < count) pair[0] = static_cast<std::uint16_t>(words[i]);
      if (begin + 2 * i + 1 < count) pair[1] = static_cast<std::uint16_t>(words[i] >> 16);
    }
  }
}

// Stores for a warp's lanes, whose groups lie `lane_elements` apart; lanes past the end may be missing.
template <class Type>
ZCOMM_DEVICE void store_warps_group(const std::uint32_t (&words)[Type::kWords], std::uint32_t begin,
                                    std::uint32_t lane_elements, std::uint32_t count, std::byte* values) {
  const std::uint32_t last_begin = begin + (31 - threadIdx.x % 32) * lane_elements;
  if (last_begin + kGroup <= count && is_aligned(values)) {
    store_words_in_pairs(words, values + begin * Type::kBytes, lane_elements * Type::kBytes);
  } else {
    store_group<Type>(words, begin, count, values);
  }
}

}  // namespace zcomm::gpu
