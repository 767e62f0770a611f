// The sizes of scratch that is kept.
#pragma once

#include <bit>
#include <cstddef>

namespace zcomm {

// Sizes are rounded to eighths of a power of two: few distinct sizes, at most an eighth unused.
inline std::size_t size_class(std::size_t num_bytes) {
  constexpr std::size_t kSmallest = 4096;
  if (num_bytes <= kSmallest) return kSmallest;
  const std::size_t step = std::bit_floor(num_bytes) / 8;
  return (num_bytes + step - 1) / step * step;
}

// A larger idle piece is better than a fresh one, within reason.
inline std::size_t largest_fit(std::size_t size) { return 2 * size; }

}  // namespace zcomm
