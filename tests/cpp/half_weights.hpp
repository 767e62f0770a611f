// Weights of 16 bits that change from step to step.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "zcomm/tensor_view.hpp"

namespace zcomm::test {

using Halves = std::vector<std::uint16_t>;

// Weights of one rank, as bfloat16, that move by a few units in the last place with each step.
inline Halves weights_of(int rank, std::size_t count, int step) {
  std::mt19937 generator(static_cast<unsigned>(rank));
  Halves values(count);
  for (auto& value : values) value = static_cast<std::uint16_t>(0x3c00 + generator() % 0x200);
  for (int i = 0; i < step; ++i) {
    for (auto& value : values) value = static_cast<std::uint16_t>(value + generator() % 3 - 1);
  }
  return values;
}

}  // namespace zcomm::test
