#include "zcomm/lossless.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "lossless_cases.hpp"
#include "sanitizers.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/error.hpp"

// Tests of round trips of every kind of value, instruction sets against each other, sizes, and damaged wires. Tests in
// tests/python compare bytes with bench/zcomm_bench/lossless_reference.py.

namespace zcomm {
namespace {

using namespace test;

// Memory of exactly so many bytes, aligned to 16: what is read or written beyond it a sanitizer sees.
class Exact {
 public:
  explicit Exact(std::span<const std::byte> bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes.size(), std::align_val_t{16}))), size_(bytes.size()) {
    std::copy(bytes.begin(), bytes.end(), data_.get());
  }
  std::span<std::byte> span() { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t{16}); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_;
};

struct Difference {
  std::vector<std::byte> body;
  std::uint64_t hash;
};

Difference encoded(const HostLosslessCodec& codec, Patterns values, Patterns base, DType dtype) {
  const std::vector<std::byte> room(max_lossless_bytes(static_cast<std::int64_t>(values.size())));
  Exact body(room);
  const auto [num_bytes, hash] = codec.encode(view(values, dtype), view(base, dtype), body.span().data());
  CHECK(base == values);
  CHECK(num_bytes <= room.size());
  const auto written = body.span().first(num_bytes);
  return {{written.begin(), written.end()}, hash};
}

Patterns decoded(const HostLosslessCodec& codec, const Difference& difference, Patterns base, DType dtype) {
  Exact body(difference.body);
  CHECK(codec.decode(body.span(), view(base, dtype)) == difference.hash);
  return base;
}

// Checks the bytes of a tile, with its table, in which four values differ from `usual`.
void check_tile(DType dtype, std::uint16_t usual, const std::array<std::uint16_t, 4>& changed,
                const std::vector<int>& expected) {
  const Patterns base(2048, usual);
  Patterns values = base;
  values[3] = changed[0], values[100] = changed[1], values[101] = changed[2], values[2047] = changed[3];
  for (const std::string& isa : cpu_isas()) {
    CAPTURE(isa);
    const Difference difference = encoded(HostLosslessCodec(isa), values, base, dtype);
    std::vector<int> bytes;
    for (const std::byte byte : difference.body) bytes.push_back(static_cast<int>(byte));
    bytes.resize(expected.size());  // padding to 16
    CHECK(bytes == expected);
    CHECK(difference.body.size() == 32);
  }
}

TEST_CASE("lossless: known tiles") {
  check_tile(DType::bfloat16, 0x3c00, {0x3c01, 0x3bff, 0x3c02, 0x7fc0},
             {6,    0,    0,    0,    0x76, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x80, 0x01, 0x10,
              0x80, 0x08, 0x30, 0x80, 0x0d, 0x06, 0x03, 0x02, 0x01, 0xc0, 0x7f, 0x00, 0x00, 0x00});
  check_tile(DType::byte_pairs, 0x1010, {0x1011, 0x0f10, 0x1210, 0x1111},
             {6,    0,    0,    0,    0x02, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x80, 0x01, 0x10,
              0x80, 0x08, 0x30, 0x80, 0x0f, 0x0d, 0x06, 0x03, 0x03, 0x10, 0x12, 0x11, 0x11, 0x00});
}

TEST_CASE("lossless: every value arrives, with the same bytes from every instruction set, for every size") {
  std::mt19937 random(1);
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n < 5000; n += 1 + n / (kSanitizers ? 4 : 64)) sizes.push_back(n);
  for (const std::int64_t n : {2047, 2048, 2049, 4095, 4096, 4097, 70001}) sizes.push_back(n);
  std::vector<HostLosslessCodec> codecs;
  for (const std::string& isa : cpu_isas()) codecs.emplace_back(isa);
  for (const std::int64_t n : sizes) {
    for (const auto& [name, change] : kChanges) {
      CAPTURE(n);
      CAPTURE(name);
      const Patterns base = weights(n, random);
      const Patterns values = changed(base, change, random);
      for (const DType dtype : {DType::bfloat16, DType::float16, DType::byte_pairs}) {
        const Difference first = encoded(codecs[0], values, base, dtype);
        for (const HostLosslessCodec& codec : codecs) {
          const Difference difference = encoded(codec, values, base, dtype);
          CHECK(difference.body == first.body);
          CHECK(difference.hash == first.hash);
          CHECK(decoded(codec, difference, base, dtype) == values);
          Patterns copy = values;
          CHECK(codec.hash(view(copy, dtype)) == first.hash);
        }
      }
    }
  }
}

TEST_CASE("lossless: every pattern as a base, with every distance by strata, arrives") {
  std::mt19937 random(2);
  for (const std::string& isa : cpu_isas()) {
    const HostLosslessCodec codec(isa);
    for (int stratum = 0; stratum <= 16; ++stratum) {
      for (const bool is_mixed : {false, true}) {
        const auto [base, values] = all_patterns(stratum, is_mixed, random);
        for (const DType dtype : {DType::bfloat16, DType::float16, DType::byte_pairs}) {
          CAPTURE(isa);
          CAPTURE(stratum);
          CHECK(decoded(codec, encoded(codec, values, base, dtype), base, dtype) == values);
        }
      }
    }
  }
}

TEST_CASE("lossless: bytes do not depend on threads, and are at most those of the values and a little") {
  std::mt19937 random(3);
  const HostLosslessCodec codec;
  for (const std::int64_t n : {2048, 4135, 262144 + 17}) {
    const Patterns base = weights(n, random);
    for (const auto& [name, change] : kChanges) {
      CAPTURE(name);
      const Patterns values = changed(base, change, random);
      const Difference one = encoded(codec, values, base, DType::bfloat16);
      set_num_threads(3);
      const Difference three = encoded(codec, values, base, DType::bfloat16);
      CHECK(decoded(codec, one, base, DType::bfloat16) == values);
      set_num_threads(1);
      CHECK(one.body == three.body);
      CHECK(one.hash == three.hash);
      CHECK(one.body.size() <= static_cast<std::size_t>(2 * n + 2 * ((n + 2047) / 2048) + 6 + 15));
    }
    // Expects only the table, because nothing has changed.
    CHECK(encoded(codec, base, base, DType::bfloat16).body.size() <= static_cast<std::size_t>(n / 1024 + 6 + 15));
  }
}

TEST_CASE("lossless: damaged wires are an error or other values, and no byte beyond them is read or written") {
  std::mt19937 random(4);
  for (const std::string& isa : cpu_isas()) {
    const HostLosslessCodec codec(isa);
    for (const std::int64_t n : {1, 100, 2048, 2049, 6000}) {
      for (const auto& [name, change] : kChanges) {
        const Patterns base = weights(n, random);
        const Difference difference = encoded(codec, changed(base, change, random), base, DType::bfloat16);
        for (int attempt = 0; attempt < 60; ++attempt) {
          std::vector<std::byte> damaged = difference.body;
          const bool cut = attempt % 3 == 0;
          if (cut) {
            damaged.resize(damaged.empty() ? 0 : random() % damaged.size());
          } else {
            for (unsigned i = 0; i <= random() % 4 && !damaged.empty(); ++i) {
              // Prefers places with sizes: the table or a head.
              const std::size_t place =
                  random() % (random() % 2 == 0 ? std::min<std::size_t>(damaged.size(), 24) : damaged.size());
              damaged[place] = static_cast<std::byte>(random());
            }
          }
          CAPTURE(isa);
          CAPTURE(name);
          CAPTURE(n);
          Patterns result = base;
          Exact values(std::as_bytes(std::span(result))), body(damaged);
          const TensorView target{values.span().data(), n, DType::bfloat16};
          try {
            const std::uint64_t hash = codec.decode(body.span(), target);
            CHECK_FALSE(cut);
            std::memcpy(result.data(), target.data, target.num_bytes());
            CHECK((hash != difference.hash || decoded(codec, difference, base, DType::bfloat16) ==
                                                  result));  // padding was hit, or a bit of no use
          } catch (const Error& error) {
            CHECK(std::string(error.what()).find("expected what an encoder wrote") != std::string::npos);
          }
        }
      }
    }
  }
}

TEST_CASE("lossless: a base that went astray gives another hash") {
  std::mt19937 random(5);
  const HostLosslessCodec codec;
  const Patterns base = weights(10000, random);
  const Difference difference = encoded(codec, changed(base, kChanges[3].second, random), base, DType::bfloat16);
  for (const std::size_t place : {0u, 2047u, 9999u}) {
    Patterns astray = base;
    astray[place] ^= 1;
    CHECK(codec.decode(difference.body, view(astray, DType::bfloat16)) != difference.hash);
  }
}

TEST_CASE("lossless: headers come back, and others are refused") {
  const LosslessHeader header{true, 4096, 7, 0x0123456789abcdef, 0xfedcba9876543210};
  std::byte wire[kLosslessHeaderBytes];
  write_header(header, wire);
  const LosslessHeader read = read_header(wire);
  CHECK(read.is_difference == header.is_difference);
  CHECK(read.body_bytes == header.body_bytes);
  CHECK(read.generation == header.generation);
  CHECK(read.base_hash == header.base_hash);
  CHECK(read.result_hash == header.result_hash);
  for (const std::size_t place : {0u, 4u, 5u, 6u, 63u}) {
    std::byte other[kLosslessHeaderBytes];
    std::memcpy(other, wire, sizeof other);
    other[place] ^= std::byte{0x42};
    CHECK_THROWS_WITH_AS(read_header(other), doctest::Contains("difference: expected a header of magic"), Error);
  }
}

TEST_CASE("lossless: wrong arguments are refused") {
  const HostLosslessCodec codec;
  Patterns values(8), base(9);
  alignas(16) std::byte body[64];
  CHECK_THROWS_WITH_AS(codec.encode(view(values, DType::bfloat16), view(base, DType::bfloat16), body),
                       doctest::Contains("base: expected 8 elements of bfloat16 as in values, got 9"), ArgumentError);
  CHECK_THROWS_WITH_AS(codec.hash({reinterpret_cast<std::byte*>(values.data()), 4, DType::float32}),
                       doctest::Contains("values: expected bfloat16, float16 or values of 8 bits"), ArgumentError);
  CHECK_THROWS_WITH_AS(HostLosslessCodec("mmx"), doctest::Contains(", got 'mmx'"), ArgumentError);
}

}  // namespace
}  // namespace zcomm
