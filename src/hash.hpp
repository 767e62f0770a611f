// Hash function with the same result on all machines.
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

}  // namespace zcomm
