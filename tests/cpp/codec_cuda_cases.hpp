// Comparison of the GPU's codec with the host's: jobs for both, and checks that they write the same bytes and no
// others.
#pragma once

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

#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::test {

constexpr std::byte kUntouched{0xAB};
constexpr std::size_t kGuard = 64;
constexpr Rounding kRounding{0x123456789abcdef0u, (std::int64_t{1} << 35) - 64};
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
  // Leaves out the surrounding bytes, so that sanitizers see reads past the end.
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
inline Bytes make_values(DType dtype, std::int64_t n, std::uint32_t seed, std::uint32_t rarity = 1) {
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

inline ConstTensorView view(const Bytes& bytes, DType dtype) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size() / element_size(dtype)), dtype};
}

// Encodes on a host.
inline Bytes encoded(const Codecs& codecs, const Bytes& values, DType dtype, BlockFormat format) {
  HostBuffer host(values);
  const std::int64_t n = view(values, dtype).num_elements;
  HostBuffer wire(WireLayout(format, dtype, n).num_bytes);
  const Encode job{{host.data(), n, dtype}, format, wire.data(), kRounding};
  codecs.host->encode({&job, 1}, {});
  return wire.bytes();
}

inline std::vector<BlockFormat> block_formats() {
  std::vector<BlockFormat> formats;
  for (ElementKind kind : {ElementKind::int8, ElementKind::int4}) {
    for (int size : {32, 64, 96, 128, 160, 256, 480, 512, 544, 1024, 1056, 2048, 3200, 4064, 4096}) {
      formats.push_back({kind, size});
    }
  }
  for (const char* text : {"fp8:64", "fp8:96", "fp8:480", "fp8:4096", "int8:64:stochastic", "int8:1056:stochastic",
                           "int4:32:stochastic", "int4:2048:stochastic", "eden2:32", "eden2:128", "eden2:256",
                           "eden2:512", "eden3:32", "eden3:64", "eden3:256", "eden4:32", "eden4:512"}) {
    formats.push_back(BlockFormat::parse(text));
  }
  return formats;
}

// Around groups, blocks, CTAs and the pieces that the tests' build cuts.
constexpr std::int64_t kCounts[] = {0, 1, 15, 16, 17, 31, 32, 33, 250, 1030, 8209, 20000};

// Bits of scales, of which most no codec writes: any sign, infinite, near the limits of a type.
inline std::vector<std::uint16_t> unusual_scales() {
  std::vector<std::uint16_t> scales = {0, 0x7f80, 0x7f7f, 0x7fc0, 0x43ff, 0x4400, 0x4401, 0x7780, 0x7781};
  for (unsigned bits = 1; bits < 0x8000; bits += 31) scales.push_back(static_cast<std::uint16_t>(bits));
  for (unsigned bits = 0x7a00; bits < 0x7f80; bits += 3) scales.push_back(static_cast<std::uint16_t>(bits));
  for (std::size_t i = 0, num_positive = scales.size(); i < num_positive; ++i) {
    scales.push_back(static_cast<std::uint16_t>(scales[i] | 0x8000u));
  }
  return scales;
}

inline void check_encode(const Codecs& codecs, const Bytes& values, DType dtype, BlockFormat format,
                         std::size_t offset) {
  const std::int64_t n = view(values, dtype).num_elements;
  const DeviceBuffer source(values, offset), wire(WireLayout(format, dtype, n).num_bytes);
  const Encode job{{source.data(), n, dtype}, format, wire.data(), kRounding};
  codecs.device->encode({&job, 1}, {});
  CHECK(wire.bytes() == encoded(codecs, values, dtype, format));
}

inline void check_decode(const Codecs& codecs, const Bytes& wire, std::int64_t n, DType wire_dtype, BlockFormat format,
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
    float factor = 1.0f;
    bool nan_is_zero = false;
  };

  Wires() = default;
  Wires(const Codecs& codecs, std::int64_t n, const std::vector<Kind>& kinds, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const Kind& kind = kinds[i % kinds.size()];
      const BlockFormat format = kind.format;
      const DType dtype = kind.dtype;
      const Bytes values = make_values(dtype, n, static_cast<std::uint32_t>(i + 7), static_cast<std::uint32_t>(count));
      const bool exact = format.kind == ElementKind::exact;
      Bytes wire = exact ? values : encoded(codecs, values, dtype, format);
      if (format.has_scales()) {  // padding does not matter
        const WireLayout layout(format, dtype, n);
        std::fill(wire.begin() + static_cast<std::ptrdiff_t>(layout.codes_offset + layout.codes_bytes), wire.end(),
                  kUntouched);
      }
      add(wire, kind, exact && i % 2 == 0 ? (i + 1) * 4 % 16 : 0);
    }
  }

  void add(const Bytes& wire, const Kind& kind, std::size_t offset) {
    host_memory.emplace_back(wire);
    device_memory.emplace_back(wire, offset);
    host.push_back({host_memory.back().data(), kind.format, kind.dtype, kind.factor, kind.nan_is_zero});
    device.push_back({device_memory.back().data(), kind.format, kind.dtype, kind.factor, kind.nan_is_zero});
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
    {{{}, DType::float32, -0.5f},
     {{ElementKind::eden4, 64}},
     {{ElementKind::int8, 96}, DType::float32, 0.9f},
     {{ElementKind::int8, 160}},
     {{ElementKind::eden3, 64}},
     {{ElementKind::fp8, 32}},
     {{ElementKind::int4, 96}, DType::bfloat16, -3e30f},
     {{ElementKind::int4, 32}}},
    {{{ElementKind::eden4, 32}}},
    {{{ElementKind::bf16}, DType::float32, 0.5f, true},
     {{ElementKind::int8, 64}, DType::float32, 1.0f, true},
     {{ElementKind::eden4, 32}, DType::float32, 0.75f, true},
     {{}, DType::float16, 1.0f, true}},
    {{{ElementKind::eden2, 128}}},
    {{{}, DType::float32, -1.5f}, {{ElementKind::eden3, 64}}, {{ElementKind::int8, 96}}, {{ElementKind::eden2, 128}}},
    {{{ElementKind::eden4, 512}, DType::bfloat16, 0.75f, true}, {{ElementKind::bf16}}},
    {{{ElementKind::eden4, 64}}, {{ElementKind::eden2, 32}, DType::float16}},
};

// Tells whether a sum of these wires can be encoded to `format`.
inline bool can_encode(const Wires& wires, BlockFormat format) {
  const bool is_power = (format.block_size & (format.block_size - 1)) == 0;
  return is_power || std::none_of(wires.host.begin(), wires.host.end(),
                                  [](const Wire& wire) { return rotates_blocks(wire.format.kind); });
}

inline void check_sum(const Codecs& codecs, Wires& wires, std::int64_t n, float factor, DType dtype,
                      std::size_t offset) {
  HostBuffer expected(static_cast<std::size_t>(n) * element_size(dtype));
  const DecodeSum host_job{wires.host, factor, {expected.data(), n, dtype}};
  codecs.host->decode_sum({&host_job, 1}, {});
  const DeviceBuffer values(expected.size, offset);
  const DecodeSum job{wires.device, factor, {values.data(), n, dtype}};
  codecs.device->decode_sum({&job, 1}, {});
  CHECK(values.bytes() == expected.bytes());
}

inline void check_sum_encode(const Codecs& codecs, Wires& wires, std::int64_t n, BlockFormat format) {
  HostBuffer expected(WireLayout(format, DType::float32, n).num_bytes);
  const DecodeSumEncode host_job{wires.host, n, format, expected.data(), kRounding};
  codecs.host->decode_sum_encode({&host_job, 1}, {});
  const DeviceBuffer wire(expected.size);
  const DecodeSumEncode job{wires.device, n, format, wire.data(), kRounding};
  codecs.device->decode_sum_encode({&job, 1}, {});
  CHECK(wire.bytes() == expected.bytes());
}

}  // namespace zcomm::test
