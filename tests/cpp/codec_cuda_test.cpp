#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/cuda/codes.cuh"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

// The GPU's codec gives the bytes of the host's and touches no others.

namespace zcomm {
namespace {

constexpr std::byte kUntouched{0xAB};
constexpr std::size_t kGuard = 64;
constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

using Bytes = std::vector<std::byte>;

// Memory of the device that begins `offset` bytes past a multiple of 16, surrounded by bytes that must not change.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t num_bytes, std::size_t offset = 0, std::size_t guard = kGuard)
      : begin_(guard + offset), num_bytes_(num_bytes), total_(begin_ + num_bytes + guard) {
    const Bytes untouched(total_, kUntouched);
    REQUIRE(cudaMalloc(&memory_, total_) == cudaSuccess);
    REQUIRE(cudaMemcpy(memory_, untouched.data(), total_, cudaMemcpyHostToDevice) == cudaSuccess);
  }
  // Not surrounded: sanitizers see reads past the end.
  explicit DeviceBuffer(const Bytes& contents, std::size_t offset = 0) : DeviceBuffer(contents.size(), offset, 0) {
    set(contents);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        begin_(other.begin_),
        num_bytes_(other.num_bytes_),
        total_(other.total_) {}
  ~DeviceBuffer() { cudaFree(memory_); }

  std::byte* data() const { return memory_ + begin_; }
  void set(const Bytes& contents) {
    REQUIRE(cudaMemcpy(data(), contents.data(), contents.size(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  // Checks the surroundings, too.
  Bytes bytes() const {
    Bytes all(total_);
    REQUIRE(cudaMemcpy(all.data(), memory_, total_, cudaMemcpyDeviceToHost) == cudaSuccess);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(begin_);
    const auto end = begin + static_cast<std::ptrdiff_t>(num_bytes_);
    const auto touched = [](std::byte byte) { return byte != kUntouched; };
    CHECK(std::none_of(all.begin(), begin, touched));
    CHECK(std::none_of(end, all.end(), touched));
    return {begin, end};
  }

 private:
  std::byte* memory_ = nullptr;
  std::size_t begin_;
  std::size_t num_bytes_;
  std::size_t total_;
};

// Host memory for the other codec: a multiple of 16.
struct HostBuffer {
  explicit HostBuffer(std::size_t num_bytes) : chunks(num_bytes / 16 + 1), size(num_bytes) {}
  explicit HostBuffer(const Bytes& contents) : HostBuffer(contents.size()) {
    std::copy(contents.begin(), contents.end(), data());
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(chunks.data()); }
  Bytes bytes() { return {data(), data() + size}; }

  struct alignas(16) Chunk {
    std::byte bytes[16];
  };
  std::vector<Chunk> chunks;
  std::size_t size;
};

struct Codecs {
  std::unique_ptr<Codec> host = make_cpu_codec();
  std::unique_ptr<Workspace> workspace = make_cuda_workspace();
  std::unique_ptr<Codec> device = make_cuda_codec(*workspace);
};

// Values in stretches of 50: of like size anywhere in the type's range, or special ones; of these there are fewer the
// larger `rarity` is.
Bytes make_values(DType dtype, std::int64_t n, std::uint32_t seed, std::uint32_t rarity = 1) {
  const std::uint32_t mantissa_bits = dtype == DType::float32 ? 23 : dtype == DType::bfloat16 ? 7 : 10;
  const std::uint32_t max_exponent = dtype == DType::float16 ? 31 : 255;
  const std::uint32_t sign = dtype == DType::float32 ? 0x80000000u : 0x8000u;
  Bytes values(static_cast<std::size_t>(n) * element_size(dtype));
  std::minstd_rand random(seed);
  std::uint32_t exponent = 0, kind = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    if (i % 50 == 0) {
      kind = static_cast<std::uint32_t>(random()) % (16 * rarity);
      exponent = static_cast<std::uint32_t>(random()) % max_exponent;
      if (kind == 1) exponent = max_exponent - 1;
      if (kind == 2) exponent = 0;
    }
    const std::uint32_t spread = static_cast<std::uint32_t>(random()) % 5;
    std::uint32_t bits = (exponent - std::min(exponent, spread)) << mantissa_bits;
    bits |= static_cast<std::uint32_t>(random()) & ((1u << mantissa_bits) - 1);
    if (kind == 3 || (kind == 4 && i % 7 == 0)) bits = 0;
    if (kind == 5 && i % 50 == 30) bits = max_exponent << mantissa_bits;           // infinity
    if (kind == 6 && i % 50 == 40) bits = max_exponent << mantissa_bits | 1u;      // NaN
    if (kind == 7) bits = static_cast<std::uint32_t>(random()) * 3u & (sign - 1);  // any
    if (kind == 8)
      bits = (max_exponent / 2 << mantissa_bits) + (static_cast<std::uint32_t>(i % 5) << (mantissa_bits - 2));  // ties
    if (random() % 2 != 0) bits |= sign;
    std::memcpy(values.data() + i * element_size(dtype), &bits, element_size(dtype));
  }
  return values;
}

ConstTensorView view(const Bytes& bytes, DType dtype) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size() / element_size(dtype)), dtype};
}

// What a host encodes.
Bytes encoded(const Codecs& codecs, const Bytes& values, DType dtype, BlockFormat format) {
  HostBuffer host(values);
  const std::int64_t n = view(values, dtype).num_elements;
  HostBuffer wire(WireLayout(format, dtype, n).num_bytes);
  const Encode job{{host.data(), n, dtype}, format, wire.data()};
  codecs.host->encode({&job, 1}, {});
  return wire.bytes();
}

std::vector<BlockFormat> block_formats() {
  std::vector<BlockFormat> formats;
  for (ElementKind kind : {ElementKind::int8, ElementKind::int4}) {
    for (int size : {32, 64, 96, 128, 160, 256, 480, 512, 544, 1024, 1056, 2048, 3200, 4064, 4096}) {
      formats.push_back({kind, size});
    }
  }
  return formats;
}

// Around groups, blocks, CTAs and the pieces that the tests' build cuts.
constexpr std::int64_t kCounts[] = {0, 1, 15, 16, 17, 31, 32, 33, 250, 1030, 8209, 20000};

void check_encode(const Codecs& codecs, const Bytes& values, DType dtype, BlockFormat format, std::size_t offset) {
  const std::int64_t n = view(values, dtype).num_elements;
  const DeviceBuffer source(values, offset), wire(WireLayout(format, dtype, n).num_bytes);
  const Encode job{{source.data(), n, dtype}, format, wire.data()};
  codecs.device->encode({&job, 1}, {});
  CHECK(wire.bytes() == encoded(codecs, values, dtype, format));
}

void check_decode(const Codecs& codecs, const Bytes& wire, std::int64_t n, DType wire_dtype, BlockFormat format,
                  DType dtype, std::size_t offset) {
  HostBuffer host_wire(wire), expected(static_cast<std::size_t>(n) * element_size(dtype));
  const Decode host_job{{host_wire.data(), format, wire_dtype}, {expected.data(), n, dtype}};
  codecs.host->decode({&host_job, 1}, {});
  const DeviceBuffer device_wire(wire), values(expected.size, offset);
  const Decode job{{device_wire.data(), format, wire_dtype}, {values.data(), n, dtype}};
  codecs.device->decode({&job, 1}, {});
  CHECK(values.bytes() == expected.bytes());
}

// Wires of n elements in kinds that repeat; every other exact one is not aligned.
struct Wires {
  struct Kind {
    BlockFormat format;
    DType dtype = DType::float32;
  };

  Wires(const Codecs& codecs, std::int64_t n, const std::vector<Kind>& kinds, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto [format, dtype] = kinds[i % kinds.size()];
      const Bytes values = make_values(dtype, n, static_cast<std::uint32_t>(i + 7), static_cast<std::uint32_t>(count));
      const bool exact = format.kind == ElementKind::exact;
      Bytes wire = exact ? values : encoded(codecs, values, dtype, format);
      if (format.has_scales()) {  // what is in the padding does not matter
        const WireLayout layout(format, dtype, n);
        std::fill(wire.begin() + static_cast<std::ptrdiff_t>(layout.codes_offset + layout.codes_bytes), wire.end(),
                  kUntouched);
      }
      host_memory.emplace_back(wire);
      device_memory.emplace_back(wire, exact && i % 2 == 0 ? (i + 1) * 4 % 16 : 0);
      host.push_back({nullptr, format, dtype});
      device.push_back({device_memory.back().data(), format, dtype});
    }
    for (std::size_t i = 0; i < count; ++i) host[i].data = host_memory[i].data();
  }

  std::vector<HostBuffer> host_memory;
  std::vector<DeviceBuffer> device_memory;
  std::vector<Wire> host, device;
};

const std::vector<std::vector<Wires::Kind>> kMixes = {
    {{{ElementKind::int8, 256}}},
    {{{ElementKind::int4, 64}}},
    {{{}, DType::float32}, {{ElementKind::int8, 96}}, {{ElementKind::int8, 4096}}},
    {{{ElementKind::int4, 480}}, {{}, DType::float16}, {{ElementKind::bf16}}, {{}, DType::bfloat16}},
    {{{}, DType::bfloat16}},
};

void check_sum(const Codecs& codecs, Wires& wires, std::int64_t n, float factor, DType dtype, std::size_t offset) {
  HostBuffer expected(static_cast<std::size_t>(n) * element_size(dtype));
  const DecodeSum host_job{wires.host, factor, {expected.data(), n, dtype}};
  codecs.host->decode_sum({&host_job, 1}, {});
  const DeviceBuffer values(expected.size, offset);
  const DecodeSum job{wires.device, factor, {values.data(), n, dtype}};
  codecs.device->decode_sum({&job, 1}, {});
  CHECK(values.bytes() == expected.bytes());
}

void check_sum_encode(const Codecs& codecs, Wires& wires, std::int64_t n, BlockFormat format) {
  HostBuffer expected(WireLayout(format, DType::float32, n).num_bytes);
  const DecodeSumEncode host_job{wires.host, n, format, expected.data()};
  codecs.host->decode_sum_encode({&host_job, 1}, {});
  const DeviceBuffer wire(expected.size);
  const DecodeSumEncode job{wires.device, n, format, wire.data()};
  codecs.device->decode_sum_encode({&job, 1}, {});
  CHECK(wire.bytes() == expected.bytes());
}

}  // namespace

TEST_SUITE("codec on a GPU") {
  TEST_CASE("encodes all types, formats and lengths") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (BlockFormat format : block_formats()) {
        for (std::int64_t n : kCounts) {
          CAPTURE(to_string(dtype));
          CAPTURE(format.to_string());
          CAPTURE(n);
          check_encode(codecs, make_values(dtype, n, static_cast<std::uint32_t>(n + format.block_size)), dtype, format,
                       0);
        }
      }
    }
  }

  TEST_CASE("encodes values at any address, and to formats without scales") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (const char* text : {"exact", "bf16", "int8:64", "int4:96", "int8:1024"}) {
        for (std::int64_t n : {1, 47, 1030, 20000}) {
          for (std::size_t offset = 0; offset < 16; offset += element_size(dtype)) {
            CAPTURE(to_string(dtype));
            CAPTURE(text);
            CAPTURE(n);
            CAPTURE(offset);
            check_encode(codecs, make_values(dtype, n, 5), dtype, BlockFormat::parse(text), offset);
          }
        }
      }
    }
  }

  TEST_CASE("decodes all types, formats and lengths") {
    const Codecs codecs;
    for (BlockFormat format : block_formats()) {
      for (std::int64_t n : kCounts) {
        const Bytes wire = encoded(codecs, make_values(DType::float32, n, 3), DType::float32, format);
        for (DType dtype : kDTypes) {
          CAPTURE(to_string(dtype));
          CAPTURE(format.to_string());
          CAPTURE(n);
          check_decode(codecs, wire, n, DType::float32, format, dtype, 0);
        }
      }
    }
  }

  TEST_CASE("decodes to any address, and from formats without scales") {
    const Codecs codecs;
    for (DType wire_dtype : kDTypes) {
      for (const char* text : {"exact", "bf16", "int8:64", "int4:96"}) {
        const BlockFormat format = BlockFormat::parse(text);
        for (std::int64_t n : {1, 47, 1030, 20000}) {
          const Bytes wire = encoded(codecs, make_values(wire_dtype, n, 11), wire_dtype, format);
          for (DType dtype : kDTypes) {
            for (std::size_t offset = 0; offset < 16; offset += element_size(dtype)) {
              CAPTURE(to_string(wire_dtype));
              CAPTURE(to_string(dtype));
              CAPTURE(text);
              CAPTURE(n);
              CAPTURE(offset);
              check_decode(codecs, wire, n, wire_dtype, format, dtype, offset);
            }
          }
        }
      }
    }
  }

  TEST_CASE("decodes what no codec wrote") {
    const Codecs codecs;
    const std::int64_t n = 32 * 4096;
    for (const char* text : {"int8:32", "int4:32"}) {
      const BlockFormat format = BlockFormat::parse(text);
      Bytes wire(WireLayout(format, DType::float32, n).num_bytes);
      std::minstd_rand random(1);
      for (std::byte& byte : wire) {
        byte = static_cast<std::byte>(random() >> 8);
        if (byte == std::byte{0x80}) byte = std::byte{0x81};
      }
      for (std::size_t i = 0; i < 4096; ++i) {  // every scale above 0 and some others
        const std::uint16_t scale = static_cast<std::uint16_t>(i < 4090 ? i * 8 + 1 : (i - 4090) * 0x2000);
        std::memcpy(wire.data() + 2 * i, &scale, 2);
      }
      for (DType dtype : kDTypes) {
        CAPTURE(text);
        CAPTURE(to_string(dtype));
        check_decode(codecs, wire, n, DType::float32, format, dtype, 0);
      }
    }
  }

  TEST_CASE("sums all kinds of wires") {
    const Codecs codecs;
    for (const auto& mix : kMixes) {
      for (std::size_t num_wires : {1, 2, 3, 7, 13}) {
        for (std::int64_t n : {0, 1, 33, 4100, 40001}) {
          Wires wires(codecs, n, mix, num_wires);
          CAPTURE(&mix - kMixes.data());
          CAPTURE(num_wires);
          CAPTURE(n);
          for (DType dtype : kDTypes) {
            CAPTURE(to_string(dtype));
            check_sum(codecs, wires, n, 1.0f, dtype, 0);
            check_sum(codecs, wires, n, 0.3f, dtype, element_size(dtype));
          }
          for (const char* text : {"exact", "bf16", "int8:32", "int4:256", "int8:96", "int4:4096", "int8:1056"}) {
            CAPTURE(text);
            check_sum_encode(codecs, wires, n, BlockFormat::parse(text));
          }
        }
      }
    }
  }

  TEST_CASE("sums more wires than fit a launch") {
    const Codecs codecs;
    for (const auto& mix : kMixes) {
      for (std::size_t num_wires : {120, 121, 128, 129, 300}) {
        CAPTURE(&mix - kMixes.data());
        CAPTURE(num_wires);
        const std::int64_t n = 200;
        Wires wires(codecs, n, mix, num_wires);
        check_sum(codecs, wires, n, 0.5f, DType::bfloat16, 0);
        check_sum(codecs, wires, n, 1.0f, DType::float32, 4);
        check_sum_encode(codecs, wires, n, BlockFormat::parse("int8:64"));
        check_sum_encode(codecs, wires, n, BlockFormat::parse("exact"));
      }
    }
  }

  TEST_CASE("jobs with more wires than fit a launch do not share what is summed first") {
    const Codecs codecs;
    const std::int64_t n = 5000;
    const BlockFormat format = BlockFormat::parse("int8:64");
    Wires one(codecs, n, kMixes[0], 200), other(codecs, n, kMixes[3], 200);
    const DeviceBuffer values_one(n * 4), values_other(n * 4),
        wire_one(WireLayout(format, DType::float32, n).num_bytes),
        wire_other(WireLayout(format, DType::float32, n).num_bytes);
    const DecodeSum sums[] = {{one.device, 1.0f, {values_one.data(), n, DType::float32}},
                              {other.device, 1.0f, {values_other.data(), n, DType::float32}}};
    const DecodeSumEncode encoded_sums[] = {{one.device, n, format, wire_one.data()},
                                            {other.device, n, format, wire_other.data()}};
    codecs.device->decode_sum(sums, {});
    codecs.device->decode_sum_encode(encoded_sums, {});
    for (std::size_t i = 0; i < 2; ++i) {
      Wires& wires = i == 0 ? one : other;
      HostBuffer values(n * 4), wire(WireLayout(format, DType::float32, n).num_bytes);
      const DecodeSum sum{wires.host, 1.0f, {values.data(), n, DType::float32}};
      const DecodeSumEncode encoded_sum{wires.host, n, format, wire.data()};
      codecs.host->decode_sum({&sum, 1}, {});
      codecs.host->decode_sum_encode({&encoded_sum, 1}, {});
      CHECK((i == 0 ? values_one : values_other).bytes() == values.bytes());
      CHECK((i == 0 ? wire_one : wire_other).bytes() == wire.bytes());
    }
  }

  TEST_CASE("sums in place") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      const std::vector<Wires::Kind> mix = {{{}, dtype}, {{ElementKind::int8, 64}}, {{ElementKind::int4, 32}}};
      for (std::size_t place : {0, 3}) {
        for (std::int64_t n : {100, 20001}) {
          Wires wires(codecs, n, mix, 4);
          HostBuffer expected(static_cast<std::size_t>(n) * element_size(dtype));
          const DecodeSum host_job{wires.host, 0.25f, {expected.data(), n, dtype}};
          codecs.host->decode_sum({&host_job, 1}, {});
          const DeviceBuffer& values = wires.device_memory[place];
          const DecodeSum job{wires.device, 0.25f, {values.data(), n, dtype}};
          codecs.device->decode_sum({&job, 1}, {});
          CHECK(values.bytes() == expected.bytes());
        }
      }
    }
  }

  TEST_CASE("batches of unlike jobs, more than fit a launch") {
    const Codecs codecs;
    const char* texts[] = {"int8:128", "int4:64", "int8:2048", "exact", "bf16"};
    std::vector<Bytes> inputs, wires_expected;
    std::vector<DeviceBuffer> values, wires, decoded, sums, recoded;
    std::vector<Encode> encodes;
    std::vector<Decode> decodes;
    std::vector<DecodeSum> decode_sums;
    std::vector<DecodeSumEncode> decode_sum_encodes;
    std::vector<Wire> sources;
    constexpr std::size_t kJobs = 700;
    sources.reserve(kJobs);
    for (std::size_t i = 0; i < kJobs; ++i) {
      const DType dtype = kDTypes[i / 5 % 3];
      const BlockFormat format = BlockFormat::parse(texts[i % 5]);
      const std::int64_t n = i % 11 == 0 ? 0 : static_cast<std::int64_t>(i * i % 613);
      inputs.push_back(make_values(dtype, n, static_cast<std::uint32_t>(i)));
      wires_expected.push_back(encoded(codecs, inputs[i], dtype, format));
      values.emplace_back(inputs[i], i % 4 * element_size(dtype));
      wires.emplace_back(wires_expected[i].size());
      decoded.emplace_back(inputs[i].size());
      sums.emplace_back(inputs[i].size());
      recoded.emplace_back(WireLayout(format, DType::float32, n).num_bytes);
      encodes.push_back({{values[i].data(), n, dtype}, format, wires[i].data()});
      sources.push_back({wires[i].data(), format, dtype});
      decodes.push_back({sources[i], {decoded[i].data(), n, dtype}});
      decode_sums.push_back({{&sources[i], 1}, 2.0f, {sums[i].data(), n, dtype}});
      decode_sum_encodes.push_back({{&sources[i], 1}, n, format, recoded[i].data()});
    }
    codecs.device->encode(encodes, {});
    codecs.device->decode(decodes, {});
    codecs.device->decode_sum(decode_sums, {});
    codecs.device->decode_sum_encode(decode_sum_encodes, {});
    for (std::size_t i = 0; i < kJobs; ++i) {
      CAPTURE(i);
      CHECK(wires[i].bytes() == wires_expected[i]);
      HostBuffer wire(wires_expected[i]), out(inputs[i].size()), again(wires_expected[i].size() * 2 + 64);
      const Wire source{wire.data(), sources[i].format, sources[i].dtype};
      const TensorView host_values{out.data(), decodes[i].values.num_elements, decodes[i].values.dtype};
      const Decode decode{source, host_values};
      codecs.host->decode({&decode, 1}, {});
      CHECK(decoded[i].bytes() == out.bytes());
      const DecodeSum sum{{&source, 1}, 2.0f, host_values};
      codecs.host->decode_sum({&sum, 1}, {});
      CHECK(sums[i].bytes() == out.bytes());
      const DecodeSumEncode recode{{&source, 1}, host_values.num_elements, source.format, again.data()};
      codecs.host->decode_sum_encode({&recode, 1}, {});
      again.size = WireLayout(source.format, DType::float32, host_values.num_elements).num_bytes;
      CHECK(recoded[i].bytes() == again.bytes());
    }
    codecs.device->encode({}, {});
  }

  TEST_CASE("calls are recorded in a graph") {
    const Codecs codecs;
    const BlockFormat format = BlockFormat::parse("int8:64");
    const std::int64_t n = 1000;
    DeviceBuffer values(make_values(DType::bfloat16, n, 1));
    const DeviceBuffer wire(WireLayout(format, DType::bfloat16, n).num_bytes);
    cudaStream_t stream;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    {
      const Encode job{{values.data(), n, DType::bfloat16}, format, wire.data()};
      codecs.device->encode({&job, 1}, {stream});
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    const Bytes later = make_values(DType::bfloat16, n, 2);
    values.set(later);
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    synchronize({stream});
    CHECK(wire.bytes() == encoded(codecs, later, DType::bfloat16, format));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }

  TEST_CASE("wrong arguments are refused before any job runs") {
    const Codecs codecs;
    const BlockFormat format = BlockFormat::parse("int8:32");
    const DeviceBuffer values(256), wire(WireLayout(format, DType::float32, 64).num_bytes);
    const Encode good{{values.data(), 64, DType::float32}, format, wire.data()};
    const Encode bad{{values.data(), 64, DType::float32}, format, wire.data() + 2};
    const Encode jobs[] = {good, bad};
    CHECK_THROWS_WITH_AS(codecs.device->encode(jobs, {}),
                         "wire: got an address 2 bytes past a multiple of 16, expected a multiple of 16",
                         ArgumentError);
    const DecodeSum no_wires{{}, 1.0f, {values.data(), 64, DType::float32}};
    CHECK_THROWS_WITH_AS(codecs.device->decode_sum({&no_wires, 1}, {}), "wires: got none, expected at least one",
                         ArgumentError);
    const Bytes bytes = wire.bytes();
    CHECK(std::count(bytes.begin(), bytes.end(), kUntouched) == static_cast<std::ptrdiff_t>(bytes.size()));
  }

  TEST_CASE("scales are those of a division") {
    const auto expected = [](std::uint32_t absmax, float max_code) {
      const float quotient = __uint_as_float(absmax) / max_code;
      const float rounded_up = __uint_as_float((__float_as_uint(quotient) + 0xffffu) & 0xffff0000u);
      return __float_as_uint(std::max(rounded_up, 0x1p-126f));
    };
    std::int64_t num_wrong = 0;
    const auto check = [&](std::uint32_t absmax) {
      for (float max_code : {127.0f, 7.0f}) {
        num_wrong += gpu::make_scale(__uint_as_float(absmax), max_code) != expected(absmax, max_code);
      }
    };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    constexpr std::uint32_t kStep = 101;
#else
    constexpr std::uint32_t kStep = 1;
#endif
    // Rounding does not depend on the exponent but where a quotient or its remainder is subnormal; that is slow, too.
    for (std::uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += kStep) check(127u << 23 | mantissa);
    for (std::uint32_t bits = 0; bits < 64u << 23; bits += 11 * kStep) check(bits);
    for (std::uint32_t bits = 64u << 23; bits < gpu::kInfinity32; bits += 101 * kStep) check(bits);
    for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
      check(exponent << 23), check(exponent << 23 | 0x7fffffu);
    }
    CHECK(num_wrong == 0);
  }

  TEST_CASE("reciprocals are those of a division") {
    std::int64_t num_wrong = 0;
    for (std::uint32_t scale_bits = 0x0080u; scale_bits < 0x7e80u; ++scale_bits) {  // 2^-126 up to 2^126
      const float scale = __uint_as_float(scale_bits << 16);
      const float reciprocal = 1.0f / scale;
      for (int ulp : {-1, 0, 1}) {
        const float approximation = __uint_as_float(__float_as_uint(reciprocal) + static_cast<std::uint32_t>(ulp));
        num_wrong += gpu::refine_reciprocal(scale, approximation) != reciprocal;
      }
    }
    CHECK(num_wrong == 0);
  }
}

}  // namespace zcomm
