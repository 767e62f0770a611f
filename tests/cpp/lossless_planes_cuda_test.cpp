// Bits of a mask and planes of small numbers, compared with loops over bits or values.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <random>

#include "codec/cuda/lossless_planes.cuh"

namespace zcomm {

namespace {

using Numbers = std::array<std::uint32_t, 32>;
using gpu::BitPlaces;
using gpu::FewBitPlaces;

constexpr int kAttempts = 2000;

// Masks of every density, from none to all ones.
std::uint64_t mask_of(int attempt, std::mt19937_64& random) {
  std::uint64_t mask = random();
  for (int i = 0; i < attempt % 5; ++i) mask &= random();
  if (attempt % 2 == 1) mask = ~mask;
  if (attempt % 50 == 0) mask = 0;
  if (attempt % 50 == 1) mask = ~std::uint64_t{0};
  return mask;
}

std::uint64_t gathered(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t result = 0;
  int place = 0;
  for (int i = 0; i < 64; ++i) {
    if ((mask >> i & 1) != 0) result |= (bits >> i & 1) << place++;
  }
  return result;
}

std::uint64_t scattered(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t result = 0;
  int place = 0;
  for (int i = 0; i < 64; ++i) {
    if ((mask >> i & 1) != 0) result |= (bits >> place++ & 1) << i;
  }
  return result;
}

// Returns a mask of all bits of the flagged bytes.
std::uint64_t bytes_mask(std::uint32_t flags) {
  std::uint64_t mask = 0;
  for (int i = 0; i < 8; ++i) mask |= (flags >> i & 1) != 0 ? std::uint64_t{0xff} << 8 * i : 0;
  return mask;
}

// Bit `bit` of each.
std::uint32_t plane_of(const Numbers& numbers, int bit) {
  std::uint32_t plane = 0;
  for (std::size_t i = 0; i < 32; ++i) plane |= (numbers[i] >> bit & 1) << i;
  return plane;
}

template <class Planes>
std::uint32_t number_of(const Planes& planes, std::size_t num_planes, std::size_t i) {
  std::uint32_t number = 0;
  for (std::size_t bit = 0; bit < num_planes; ++bit) number |= (planes[bit] >> i & 1) << bit;
  return number;
}

Numbers numbers_below(std::uint32_t end, std::mt19937_64& random) {
  Numbers numbers;
  for (std::uint32_t& number : numbers) number = static_cast<std::uint32_t>(random() % end);
  return numbers;
}

gpu::Bytes planes_of(const Numbers& numbers) {
  gpu::Bytes bytes;
  for (int bit = 0; bit < 8; ++bit) bytes.planes[bit] = plane_of(numbers, bit);
  return bytes;
}

std::uint32_t clamped_width(std::uint32_t number, std::uint32_t exponent) {
  return number < exponent ? 0 : std::min(number - exponent, 7u);
}

}  // namespace

TEST_SUITE("planes of differences on a GPU") {
  TEST_CASE("bits are gathered from and scattered to the ones of a mask") {
    std::mt19937_64 random(1);
    int num_wrong = 0;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const std::uint64_t mask = mask_of(attempt, random), bits = random();
      num_wrong += gpu::gather_bits<BitPlaces>(bits, mask) != gathered(bits, mask);
      num_wrong += gpu::gather_bits<FewBitPlaces>(bits, mask) != gathered(bits, mask);
      num_wrong += gpu::scatter_bits<BitPlaces>(bits, mask) != scattered(bits, mask);
      num_wrong += gpu::scatter_bits<FewBitPlaces>(bits, mask) != scattered(bits, mask);
    }
    CHECK(num_wrong == 0);
  }

  TEST_CASE("bytes are gathered from and scattered to those that flags name") {
    std::mt19937_64 random(2);
    int num_wrong = 0;
    for (std::uint32_t flags = 0; flags < 256; ++flags) {
      const std::uint64_t bits = random(), mask = bytes_mask(flags);
      num_wrong += gpu::gather_bytes(bits, flags) != gathered(bits, mask);
      num_wrong += gpu::scatter_bytes(bits, flags) != scattered(bits, mask);
      for (std::uint32_t count = 0; count <= 64; ++count) {
        const std::uint64_t used = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
        const std::uint32_t used_flags = flags & ((1u << (count + 7) / 8) - 1);
        const auto expected = static_cast<std::uint32_t>(std::popcount(bytes_mask(used_flags) & used));
        num_wrong += gpu::bits_of_groups(used_flags, count) != expected;
      }
    }
    for (int bit = 0; bit < 32; ++bit) {
      num_wrong += gpu::byte_flags(1u << bit) != 1u << bit / 8;
      num_wrong += gpu::byte_flags(~(0xffu << bit / 8 * 8)) != (0xfu & ~(1u << bit / 8));
    }
    CHECK(num_wrong == 0);
  }

  TEST_CASE("values become planes, and planes words of four") {
    std::mt19937_64 random(3);
    const Numbers values = numbers_below(1 << 16, random);
    std::uint32_t words[gpu::kHalfWords], fours[8];
    for (std::size_t i = 0; i < gpu::kHalfWords; ++i) words[i] = values[2 * i] | values[2 * i + 1] << 16;
    const gpu::HalfPlanes planes(words);
    for (int bit = 0; bit < 16; ++bit) CHECK(planes.plane(static_cast<std::uint32_t>(bit)) == plane_of(values, bit));
    planes.low.to_words(fours);
    for (std::size_t i = 0; i < 32; ++i) CHECK((fours[i / 4] >> i % 4 * 8 & 0xffu) == (values[i] & 0xffu));
    const gpu::Bytes wide = planes.exponents(DType::bfloat16), narrow = planes.exponents(DType::float16),
                     constant = planes.exponents(DType::byte_pairs);
    for (std::size_t i = 0; i < 32; ++i) {
      CHECK(number_of(wide.planes, 8, i) == (values[i] >> 7 & 0xffu));
      CHECK(number_of(narrow.planes, 8, i) == (values[i] >> 10 & 0x1fu));
      CHECK(number_of(constant.planes, 8, i) == gpu::kPairExponent);
    }
  }

  TEST_CASE("widths are clamped distances from exponents") {
    std::mt19937_64 random(4);
    int num_wrong = 0;
    for (std::uint32_t number = 0; number < 300; ++number) {
      for (int attempt = 0; attempt < 8; ++attempt) {
        Numbers exponents = numbers_below(256, random);
        for (std::size_t i = 0; i < 20; ++i) exponents[i] = std::min(255u, number + 10 - static_cast<std::uint32_t>(i));
        if (number < 10) exponents[0] = exponents[1] = 0;
        for (std::uint32_t& exponent : exponents) exponent &= 255u;
        const gpu::Widths widths(number, planes_of(exponents));
        std::uint32_t sum = 0;
        for (std::size_t i = 0; i < 32; ++i) {
          const std::uint32_t expected = clamped_width(number, exponents[i]);
          sum += expected;
          num_wrong += number_of(widths.planes, 3, i) != expected;
          num_wrong += (widths.is_far_below >> i & 1) != (exponents[i] > number + 1);
          for (std::uint32_t limit = 0; limit < 7; ++limit) {
            num_wrong += (widths.is_above(limit) >> i & 1) != (expected > limit);
          }
        }
        num_wrong += widths.sum() != sum;
      }
    }
    CHECK(num_wrong == 0);
  }

  TEST_CASE("numbers are shifted by widths of their own") {
    std::mt19937_64 random(5);
    const Numbers numbers = numbers_below(256, random), widths = numbers_below(8, random);
    std::uint32_t up[15] = {}, down[8] = {};
    for (int bit = 0; bit < 8; ++bit) up[bit] = down[bit] = plane_of(numbers, bit);
    const std::uint32_t shifts[3] = {plane_of(widths, 0), plane_of(widths, 1), plane_of(widths, 2)};
    gpu::shift_up(up, shifts);
    gpu::shift_down(down, shifts);
    for (std::size_t i = 0; i < 32; ++i) {
      CHECK(number_of(up, 15, i) == numbers[i] << widths[i]);
      CHECK(number_of(down, 8, i) == numbers[i] >> widths[i]);
    }
  }

  TEST_CASE("four fields are joined and split") {
    std::mt19937_64 random(6);
    int num_wrong = 0;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      std::uint32_t fields = 0, widths = 0, joined = 0, num_bits = 0;
      for (int i = 0; i < 4; ++i) {
        const auto width = static_cast<std::uint32_t>(attempt == 0 ? 7 : random() % 8);
        const auto field = static_cast<std::uint32_t>(random()) & ((1u << width) - 1);
        fields |= field << 8 * i, widths |= width << 8 * i;
        joined |= field << num_bits, num_bits += width;
      }
      const auto above = static_cast<std::uint32_t>(random()) << num_bits;
      num_wrong += gpu::sum_of_bytes(widths) != num_bits;
      num_wrong += gpu::join_fields(fields, widths) != joined;
      num_wrong += gpu::split_fields(joined | above, widths) != fields;
    }
    CHECK(num_wrong == 0);
  }
}

}  // namespace zcomm
