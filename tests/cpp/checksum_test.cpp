// Tests of the checksum that checked transports send: it changes with every small fault.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "zcomm/checked_transport.hpp"

namespace zcomm {

TEST_CASE("checksums: every bit, the length and the order of words count") {
  std::mt19937_64 random(1);
  for (const std::size_t num_bytes : {1, 7, 8, 63, 64, 65, 200}) {
    std::vector<std::byte> bytes(num_bytes);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    const std::uint64_t right = checksum(bytes.data(), num_bytes);
    CHECK(checksum(bytes.data(), num_bytes) == right);
    for (std::size_t bit = 0; bit < 8 * num_bytes; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      if (checksum(bytes.data(), num_bytes) == right) FAIL("bit ", bit, " of ", num_bytes, " bytes does not count");
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    for (std::size_t a = 0; a + 16 <= num_bytes; a += 8) {
      std::vector<std::byte> swapped = bytes;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(a),
                       swapped.begin() + static_cast<std::ptrdiff_t>(a) + 8,
                       swapped.begin() + static_cast<std::ptrdiff_t>(a) + 8);
      CHECK(checksum(swapped.data(), num_bytes) != right);
    }
  }
  const std::vector<std::byte> zeros(300);
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0; i <= zeros.size(); ++i) sums.push_back(checksum(zeros.data(), i));
  std::ranges::sort(sums);
  CHECK(std::ranges::adjacent_find(sums) == sums.end());
}

TEST_CASE("checksums: each pair of bits counts, also in neighbouring words of a lane") {
  std::mt19937_64 random(4);
  std::vector<std::byte> bytes(136);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const std::uint64_t right = checksum(bytes.data(), bytes.size());
  const auto flip = [&](std::size_t bit) { bytes[bit / 8] ^= std::byte{1} << (bit % 8); };
  for (std::size_t a = 0; a < 8 * bytes.size(); ++a) {
    flip(a);
    for (std::size_t b = 0; b < a; ++b) {
      flip(b);
      if (checksum(bytes.data(), bytes.size()) == right) FAIL("bits ", a, " and ", b, " do not count");
      flip(b);
    }
    flip(a);
  }
}

TEST_CASE("checksums: 100,000 random faults of up to 16 bits are found") {
  std::mt19937_64 random(2);
  std::vector<std::byte> bytes(5003);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const std::uint64_t right = checksum(bytes.data(), bytes.size());
  int num_planted = 0;
  for (int fault = 0; fault < 100000; ++fault) {
    std::vector<std::size_t> flipped;
    for (std::uint64_t i = random() % 16 + 1; i > 0; --i) {
      const std::size_t bit = random() % (8 * bytes.size());
      if (std::ranges::find(flipped, bit) == flipped.end()) flipped.push_back(bit);
    }
    const auto flip = [&] {
      for (const std::size_t bit : flipped) bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    };
    flip();
    num_planted += flipped.empty() ? 0 : 1;
    if (checksum(bytes.data(), bytes.size()) == right) FAIL("fault ", fault, " is not found");
    flip();
  }
  CHECK(num_planted == 100000);
  CHECK(checksum(bytes.data(), bytes.size()) == right);
}

}  // namespace zcomm
