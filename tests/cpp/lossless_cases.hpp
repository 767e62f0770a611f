// Values of 16 bits, and how they change from one message of differences to the next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "zcomm/tensor_view.hpp"

namespace zcomm::test {

using Patterns = std::vector<std::uint16_t>;

inline TensorView view(Patterns& values, DType dtype) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), dtype};
}

// Values and how they change, with every kind of difference that the code tells apart.
using Change = std::function<std::uint16_t(std::uint16_t, std::mt19937&)>;
inline std::uint16_t near(std::uint16_t value, std::mt19937& random, int limit) {
  return static_cast<std::uint16_t>(value + static_cast<int>(random() % static_cast<unsigned>(2 * limit + 1)) - limit);
}
inline const std::vector<std::pair<const char*, Change>> kChanges{
    {"none", [](std::uint16_t a, std::mt19937&) { return a; }},
    {"one in 3000", [](std::uint16_t a, std::mt19937& r) { return r() % 3000 == 0 ? near(a, r, 1) : a; }},
    {"one in 20", [](std::uint16_t a, std::mt19937& r) { return r() % 20 == 0 ? near(a, r, 2) : a; }},
    {"few units", [](std::uint16_t a, std::mt19937& r) { return near(a, r, 3); }},
    {"up to an escape", [](std::uint16_t a, std::mt19937& r) { return near(a, r, 140); }},
    {"by exponent",
     [](std::uint16_t a, std::mt19937& r) {
       const int width = 128 - (a >> 7 & 0xff);
       return near(a, r, width < 0 ? 0 : 1 << std::min(width, 9));
     }},
    {"sign",
     [](std::uint16_t a, std::mt19937& r) { return r() % 9 == 0 ? static_cast<std::uint16_t>(a ^ 0x8000) : a; }},
    {"special values",
     [](std::uint16_t a, std::mt19937& r) {
       constexpr std::uint16_t kSpecial[] = {0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81, 0x7c00, 0xfc01, 1};
       return r() % 5 == 0 ? kSpecial[r() % std::size(kSpecial)] : a;
     }},
    {"one byte of a pair",
     [](std::uint16_t a, std::mt19937& r) {
       const int shift = static_cast<int>(r() % 2 * 8), width = 1 << r() % 8;
       return r() % 6 == 0 ? static_cast<std::uint16_t>((a & (0xff00 >> shift)) |
                                                        (near(a >> shift & 0xff, r, width) & 0xff) << shift)
                           : a;
     }},
    {"anything", [](std::uint16_t, std::mt19937& r) { return static_cast<std::uint16_t>(r()); }},
};

inline Patterns weights(std::int64_t count, std::mt19937& random) {
  Patterns values(static_cast<std::size_t>(count));
  std::normal_distribution<float> normal(0, 0.02f);
  for (std::uint16_t& value : values) {
    const float weight = normal(random);
    std::uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    value = static_cast<std::uint16_t>(bits >> 16);
  }
  return values;
}

inline Patterns changed(const Patterns& base, const Change& change, std::mt19937& random) {
  Patterns values = base;
  for (std::uint16_t& value : values) value = change(value, random);
  return values;
}

// Every pattern, and one that is off by less than 2^stratum: in order, so that exponents are alike in a tile, or mixed.
inline std::pair<Patterns, Patterns> all_patterns(int stratum, bool is_mixed, std::mt19937& random) {
  Patterns base(65536), values(65536);
  for (std::size_t i = 0; i < base.size(); ++i) {
    base[i] = static_cast<std::uint16_t>(is_mixed ? i * 40503 : i);
    const auto distance = static_cast<std::uint16_t>(random() & ((1u << stratum) - 1));
    values[i] = static_cast<std::uint16_t>(random() % 2 != 0 ? base[i] + distance : base[i] - distance);
  }
  return {base, values};
}

}  // namespace zcomm::test
