// Hash functions with the same results on all machines.
#pragma once

#include <cstdint>
#include <string_view>

namespace zcomm {

inline constexpr std::uint64_t kFnvBasis = 0xcbf29ce484222325;

// Returns the 64-bit FNV-1a hash of `text`; `hash` is that of the preceding text.
constexpr std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = kFnvBasis) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

inline constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio, odd

// Mixes as the finalizer of splitmix64 (Steele et al., OOPSLA 2014): a bijection.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace zcomm
