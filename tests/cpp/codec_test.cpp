#include "zcomm/codec.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "sanitizers.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

// Tests of instruction sets against each other, batches, tasks, untouched memory and arguments. test_codec.py in
// tests/python compares bits with bench/zcomm_bench/reference.py.

namespace zcomm {
namespace {

constexpr std::byte kUntouched{0xAB};
constexpr std::size_t kGuard = 64;

// Aligned memory, surrounded by bytes that must not change.
class Buffer {
 public:
  explicit Buffer(std::size_t num_bytes) : bytes_((num_bytes + 3 * kGuard) / 16 + 1), num_bytes_(num_bytes) {
    std::fill_n(reinterpret_cast<std::byte*>(bytes_.data()), bytes_.size() * 16, kUntouched);
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(bytes_.data()) + kGuard; }
  std::vector<std::byte> bytes() { return {data(), data() + num_bytes_}; }
  bool guards_are_intact() {
    const auto untouched = [](std::byte byte) { return byte == kUntouched; };
    return std::all_of(data() - kGuard, data(), untouched) &&
           std::all_of(data() + num_bytes_, data() + num_bytes_ + kGuard, untouched);
  }

 private:
  struct alignas(16) Chunk {
    std::byte bytes[16];
  };
  std::vector<Chunk> bytes_;
  std::size_t num_bytes_;
};

std::vector<float> ramp(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(std::sin(static_cast<float>(i) * 0.7f), static_cast<int>(i / 40 % 60) - 30);
  }
  return values;
}

ConstTensorView view(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), DType::float32};
}

TensorView view(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), DType::float32};
}

Buffer wire_buffer(BlockFormat format, DType dtype, std::int64_t n) {
  return Buffer(WireLayout(format, dtype, n).num_bytes);
}

std::vector<std::byte> encoded(const Codec& codec, const std::vector<float>& values, BlockFormat format) {
  Buffer wire = wire_buffer(format, DType::float32, view(values).num_elements);
  const Encode job{view(values), format, wire.data(), {17, 64}};
  codec.encode({&job, 1}, {});
  CHECK(wire.guards_are_intact());
  return wire.bytes();
}

}  // namespace

TEST_CASE("promise 2: every instruction set gives the same bytes and touches no others") {
  const auto baseline = make_cpu_codec("baseline");
  for (const std::string& isa : cpu_isas()) {
    const auto codec = make_cpu_codec(isa);
    for (const char* text :
         {"exact", "bf16", "int8:32", "int8:96", "int8:4096", "int4:32", "int4:128", "int4:96:stochastic", "int4:4096",
          "int8:64:stochastic", "fp8:32", "fp8:96", "eden2:32", "eden2:512", "eden3:64", "eden4:128"}) {
      const BlockFormat format = BlockFormat::parse(text);
      for (std::int64_t n : {0, 1, 21, 31, 32, 33, 63, 64, 127, 128, 129, 4095, 4096, 4097, 70001}) {
        if (test::kThreadSanitizer && n > 5000) continue;
        CAPTURE(isa);
        CAPTURE(text);
        CAPTURE(n);
        const std::vector<float> values = ramp(n);
        const std::vector<std::byte> expected = encoded(*baseline, values, format);
        CHECK(encoded(*codec, values, format) == expected);

        Buffer wire = wire_buffer(format, DType::float32, n);
        std::copy(expected.begin(), expected.end(), wire.data());
        for (DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
          Buffer one(static_cast<std::size_t>(n) * element_size(dtype)), other(one);
          const Wire source{wire.data(), format, DType::float32};
          const Decode jobs[] = {{source, {one.data(), n, dtype}}, {source, {other.data(), n, dtype}}};
          codec->decode({&jobs[0], 1}, {});
          baseline->decode({&jobs[1], 1}, {});
          CHECK(one.bytes() == other.bytes());
          CHECK(one.guards_are_intact());

          const Wire sources[] = {source, source, {wire.data(), format, DType::float32, -0.9f}, source};
          const DecodeSum sum{sources, 0.3f, {other.data(), n, dtype}};
          baseline->decode_sum({&sum, 1}, {});
          for (bool read_late : {false, true}) {
            const DecodeSum same_sum{sources, 0.3f, {one.data(), n, dtype}, read_late};
            codec->decode_sum({&same_sum, 1}, {});
            CHECK(one.bytes() == other.bytes());
            CHECK(one.guards_are_intact());
          }
        }
      }
    }
  }
}

TEST_CASE("codes and scales of a known block") {
  std::vector<float> values(33, 0.0f);
  values[0] = 1.0f, values[1] = -3.5f, values[2] = 2.0f, values[32] = 7.0f;
  const std::vector<std::byte> wire = encoded(*make_cpu_codec(), values, BlockFormat::parse("int4:32"));
  std::vector<std::byte> expected(48);
  expected[1] = std::byte{0x3f};                                   // 0.5
  expected[2] = std::byte{0x80}, expected[3] = std::byte{0x3f};    // 1
  expected[16] = std::byte{0x92}, expected[17] = std::byte{0x04};  // 2, -7, 4
  expected[32] = std::byte{0x07};
  CHECK(wire == expected);
}

TEST_CASE("the sum that is encoded is the sum") {
  const auto codec = make_cpu_codec();
  const std::int64_t n = 100001;
  std::vector<float> values = ramp(n);
  const BlockFormat int8 = BlockFormat::parse("int8:96");
  Buffer wire = wire_buffer(int8, DType::float32, n);
  const Encode job{view(values), int8, wire.data()};
  codec->encode({&job, 1}, {});
  const Wire wires[] = {{reinterpret_cast<std::byte*>(values.data()), BlockFormat::parse("exact"), DType::float32},
                        {wire.data(), int8, DType::float32}};
  std::vector<float> total(values.size());
  const DecodeSum sum{wires, 1.0f, view(total)};
  codec->decode_sum({&sum, 1}, {});
  for (const char* text : {"bf16", "int4:128", "int8:1056"}) {
    const BlockFormat format = BlockFormat::parse(text);
    Buffer fused = wire_buffer(format, DType::float32, n);
    const DecodeSumEncode fused_job{wires, n, format, fused.data()};
    codec->decode_sum_encode({&fused_job, 1}, {});
    CHECK(fused.bytes() == encoded(*codec, total, format));
    CHECK(fused.guards_are_intact());
  }

  // Writes in place over the exact wire.
  const DecodeSum in_place{wires, 1.0f, view(values)};
  codec->decode_sum({&in_place, 1}, {});
  CHECK(values == total);
}

TEST_CASE("a sum that is encoded may overwrite one of its wires") {
  const auto codec = make_cpu_codec();
  const std::int64_t n = 100001;
  std::vector<float> values = ramp(n);
  for (const char* text : {"exact", "bf16", "int8:96", "eden3:32", "int4:4096:stochastic", "fp8:1056", "eden3:256"}) {
    CAPTURE(text);
    const BlockFormat format = BlockFormat::parse(text);
    Buffer residual = wire_buffer(format, DType::float32, n), expected(residual),
           sent = wire_buffer(format, DType::float32, n);
    const Encode jobs[] = {{view(values), format, residual.data()}, {view(values), format, sent.data(), {1, 0}}};
    codec->encode(jobs, {});
    const Wire wires[] = {{residual.data(), format, DType::float32, 0.5f},
                          {reinterpret_cast<std::byte*>(values.data()), {}, DType::float32},
                          {sent.data(), format, DType::float32, -1.0f}};
    const DecodeSumEncode apart{wires, n, format, expected.data(), {3, 0}};
    codec->decode_sum_encode({&apart, 1}, {});
    const DecodeSumEncode in_place{wires, n, format, residual.data(), {3, 0}};
    set_num_threads(3);
    codec->decode_sum_encode({&in_place, 1}, {});
    set_num_threads(1);
    CHECK(residual.bytes() == expected.bytes());
    CHECK(residual.guards_are_intact());
  }
}

TEST_CASE("a batch of jobs, on any number of threads") {
  const auto codec = make_cpu_codec();
  const BlockFormat format = BlockFormat::parse("int8:160");
  std::vector<std::vector<float>> inputs;
  for (std::int64_t n : {70000, 0, 1, 200000, 32768, 0}) inputs.push_back(ramp(n));
  for (int num_threads : {1, 3}) {
    set_num_threads(num_threads);
    std::vector<Buffer> wires;
    for (const auto& input : inputs) wires.push_back(wire_buffer(format, DType::float32, view(input).num_elements));
    std::vector<Encode> jobs;
    for (std::size_t i = 0; i < inputs.size(); ++i) jobs.push_back({view(inputs[i]), format, wires[i].data()});
    codec->encode(jobs, {});
    set_num_threads(1);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CHECK(wires[i].bytes() == encoded(*codec, inputs[i], format));
      CHECK(wires[i].guards_are_intact());
    }
  }
  codec->encode({}, {});
}

TEST_CASE("values need no more alignment than their elements") {
  const auto codec = make_cpu_codec();
  const std::vector<float> values = ramp(1001);
  const BlockFormat format = BlockFormat::parse("int8:64");
  const std::vector<float> shorter(values.begin() + 1, values.end());
  Buffer wire = wire_buffer(format, DType::float32, 1000);
  const Encode job{view(values).slice(1, 1000), format, wire.data()};
  codec->encode({&job, 1}, {});
  CHECK(wire.bytes() == encoded(*codec, shorter, format));
  Buffer bytes(2002);
  const Decode decode{{wire.data(), format, DType::float32}, {bytes.data() + 2, 1000, DType::bfloat16}};
  codec->decode({&decode, 1}, {});
  CHECK(bytes.guards_are_intact());
}

TEST_CASE("wrong arguments are refused before any job runs") {
  const auto codec = make_cpu_codec();
  const std::vector<float> values = ramp(64);
  const BlockFormat format = BlockFormat::parse("int8:32");
  const WireLayout layout(format, DType::float32, 64);
  Buffer wire(layout.num_bytes + 16);
  const Encode good{view(values), format, wire.data()};
  const auto check_refused = [&](Encode bad, const char* message) {
    const Encode jobs[] = {good, bad};
    CHECK_THROWS_WITH_AS(codec->encode(jobs, {}), message, ArgumentError);
    CHECK(wire.bytes() == std::vector<std::byte>(layout.num_bytes + 16, kUntouched));
  };
  check_refused({view(values), format, wire.data() + 2},
                "wire: expected an address that is a multiple of 16, got 2 bytes past one");
  check_refused({view(values), format, nullptr}, "wire: expected memory of 64 elements, got a null pointer");
  check_refused({{nullptr, 64, DType::float32}, format, wire.data()},
                "values: expected memory of 64 elements, got a null pointer");
  check_refused({{good.values.data, -1, DType::float32}, format, wire.data()},
                "values: expected 0 or more elements, got -1");
  check_refused({{good.values.data + 2, 1, DType::float32}, format, wire.data()},
                "values: expected an address that is a multiple of 4, got 2 bytes past one");
  check_refused(
      {view(values), {ElementKind::int8, 48}, wire.data()},
      "format: expected exact, bf16, int8:B, int4:B, fp8:B, eden2:B, eden3:B or eden4:B, got "
      "'int8:48': B is a multiple of 32 from 32 to 4096, for eden a power of two up to 512; :stochastic may follow "
      "B of int8 and int4");
  check_refused({view(values), {ElementKind::exact, 32}, wire.data()},
                "format: expected a block size of 0 with exact, got 32");
  check_refused({{good.values.data, 64, DType::byte_pairs}, format, wire.data()},
                "dtype: expected float32, bfloat16 or float16, got byte_pairs");

  check_refused({view(values), format, wire.data(), {0, 48}},
                "first_element: expected a multiple of 32, 0 or more, got 48");

  std::vector<float> out(64);
  const Decode twice{{wire.data(), format, DType::float32, 2.0f}, view(out)};
  CHECK_THROWS_WITH_AS(codec->decode({&twice, 1}, {}),
                       "wire: expected a factor of 1 to decode, got 2.000000: decode_sum takes others", ArgumentError);
  const Decode residual{{wire.data(), format, DType::float32, 1.0f, true}, view(out)};
  CHECK_THROWS_WITH_AS(codec->decode({&residual, 1}, {}),
                       "wire: expected no nan_is_zero to decode, got it: decode_sum takes it", ArgumentError);
  const DecodeSum no_wires{{}, 1.0f, view(out)};
  CHECK_THROWS_WITH_AS(codec->decode_sum({&no_wires, 1}, {}), "wires: expected at least one, got none", ArgumentError);
  const Wire read{wire.data(), BlockFormat::parse("int8:64"), DType::float32};
  const DecodeSumEncode over_another{{&read, 1}, 64, format, wire.data()};
  CHECK_THROWS_WITH_AS(codec->decode_sum_encode({&over_another, 1}, {}),
                       "wire: expected memory apart from a wire of another format, int8:64, got the same",
                       ArgumentError);
  const Wire rotated{wire.data(), BlockFormat::parse("eden2:64"), DType::float32};
  Buffer other(256);
  const DecodeSumEncode to_odd_blocks{{&rotated, 1}, 64, BlockFormat::parse("int8:96"), other.data()};
  CHECK_THROWS_WITH_AS(codec->decode_sum_encode({&to_odd_blocks, 1}, {}),
                       "format: expected a block size that is a power of two for a sum of eden2:64 wires, got int8:96",
                       ArgumentError);
  CHECK_THROWS_AS(make_cpu_codec("mmx"), ArgumentError);
}

}  // namespace zcomm
