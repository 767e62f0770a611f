// Float32 tensors on the host for tests of the collectives, and the bound of what a format loses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "zcomm/block_format.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::test {

using Values = std::vector<float>;

struct Shape {
  std::vector<int> nodes;
  bool interleaved = false;
};
inline const std::vector<Shape> kShapes{{{1}},    {{4}},          {{1, 1, 1, 1}}, {{2, 2}},
                                        {{3, 1}}, {{2, 2}, true}, {{3, 3}},       {{2, 2, 2}, true}};

inline TensorView view(Values& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), DType::float32};
}
inline ConstTensorView view(const Values& values) { return view(const_cast<Values&>(values)); }

inline std::vector<ConstTensorView> const_split(const Values& values, int size) {
  const auto slots = split(view(values), size, static_cast<std::int64_t>(values.size()) / size);
  return {slots.begin(), slots.end()};
}

inline bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// One tensor per rank; magnitudes spread over blocks.
inline std::vector<Values> random_tensors(int size, std::int64_t num_elements, unsigned seed) {
  std::vector<Values> tensors;
  for (int rank = 0; rank < size; ++rank) {
    std::mt19937 generator(seed * 1000 + static_cast<unsigned>(rank));
    std::normal_distribution<float> normal;
    Values values(static_cast<std::size_t>(num_elements));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::ldexp(normal(generator), static_cast<int>(i / 64 % 5));
    tensors.push_back(std::move(values));
  }
  return tensors;
}

// Half a scale of the block of element i, for values known up to `error`: the bound of one quantization (promise 3).
// For formats that are neither rotated nor stochastic.
inline double half_scale(const std::vector<double>& values, std::size_t i, BlockFormat format, double error = 0) {
  if (format.kind == ElementKind::exact) return 0;
  if (format.kind == ElementKind::bf16) return (std::abs(values[i]) + error) * 0x1p-8;
  const auto block = static_cast<std::size_t>(format.block_size);
  const std::size_t begin = i / block * block;
  const std::size_t end = std::min(begin + block, values.size());
  double absmax = 0;
  for (std::size_t j = begin; j < end; ++j) absmax = std::max(absmax, std::abs(values[j]));
  // Neighbouring codes differ by 1, or, near the largest e4m3 code, by 32.
  const double half_step = format.kind == ElementKind::fp8 ? 16 : 0.5;
  // Rounding the scale up to bfloat16 adds at most 2^-7 of it; 2^-20 covers the float32 steps.
  return half_step * (absmax + error) / traits(format.kind).max_code * (1 + 0x1p-7) * (1 + 0x1p-20);
}

}  // namespace zcomm::test
