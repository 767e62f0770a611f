// Size classes of pooled scratch memory.
#pragma once

#include <bit>
#include <cstddef>

namespace zcomm {

// Rounds up to eighths of a power of two: few distinct sizes, at most an eighth unused.
inline std::size_t size_class(std::size_t num_bytes) {
  constexpr std::size_t kSmallest = 4096;
  if (num_bytes <= kSmallest) return kSmallest;
  const std::size_t step = std::bit_floor(num_bytes) / 8;
  return (num_bytes + step - 1) / step * step;
}

// Largest idle piece to use instead of a new allocation.
inline std::size_t largest_fit(std::size_t size) { return 2 * size; }

}  // namespace zcomm
