#include "codec_cuda_cases.hpp"
#include "sanitizers.hpp"

namespace zcomm {

using namespace test;

TEST_SUITE("codec on a GPU") {
  TEST_CASE("encodes all types, formats and lengths") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (BlockFormat format : block_formats()) {
        for (std::int64_t n : kCounts) {
          if (kSanitizers && n > 10000) continue;
          CAPTURE(to_string(dtype));
          CAPTURE(format.to_string());
          CAPTURE(n);
          check_encode(codecs, make_values(dtype, n, static_cast<std::uint32_t>(n + format.block_size)), dtype, format,
                       0);
        }
      }
    }
  }

  TEST_CASE("encodes whole CTAs, with zeros after their scales") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (const char* text : {"int8:2048", "int8:4096", "int4:4096"}) {
        for (std::int64_t n : {8192, 16384, 24576}) {
          CAPTURE(to_string(dtype));
          CAPTURE(text);
          CAPTURE(n);
          check_encode(codecs, make_values(dtype, n, 3), dtype, BlockFormat::parse(text), 0);
        }
      }
    }
  }

  TEST_CASE("encodes values at any address, and to formats without scales") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (const char* text : {"exact", "bf16", "int8:64", "int4:96", "int8:1024", "eden3:32", "eden2:64"}) {
        for (std::int64_t n : {1, 47, 1030, 20000}) {
          for (std::size_t offset = 0; offset < 16; offset += element_size(dtype)) {
            if (kSanitizers && n > 5000 && offset != 0) continue;
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
        if (kSanitizers && n > 10000) continue;
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
      for (const char* text : {"exact", "bf16", "int8:64", "int4:96", "int4:32", "eden3:128"}) {
        const BlockFormat format = BlockFormat::parse(text);
        for (std::int64_t n : {1, 47, 1030, 20000}) {
          const Bytes wire = encoded(codecs, make_values(wire_dtype, n, 11), wire_dtype, format);
          for (DType dtype : kDTypes) {
            for (std::size_t offset = 0; offset < 16; offset += element_size(dtype)) {
              if (kSanitizers && n > 5000 && offset != 0) continue;
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

  TEST_CASE("decodes and sums what no codec wrote") {
    const Codecs codecs;
    for (const char* text : {"int8:32", "int4:32", "fp8:32", "eden2:32", "eden3:32", "eden4:32"}) {
      const BlockFormat format = BlockFormat::parse(text);
      const std::vector<std::uint16_t> scales = unusual_scales();
      const auto n = static_cast<std::int64_t>(32 * scales.size());
      Bytes wire(WireLayout(format, DType::float32, n).num_bytes);
      std::minstd_rand random(1);
      for (std::byte& byte : wire) byte = static_cast<std::byte>(random() >> 8);
      std::memcpy(wire.data(), scales.data(), 2 * scales.size());
      Wires wires;
      wires.add(wire, {format}, 0);
      wires.add(wire, {format, DType::float32, 0.75f}, 0);
      for (DType dtype : kDTypes) {
        CAPTURE(text);
        CAPTURE(to_string(dtype));
        check_decode(codecs, wire, n, DType::float32, format, dtype, 0);
        check_sum(codecs, wires, n, 1.0f, dtype, 0);
      }
    }
  }

  TEST_CASE("rotates blocks back that overflow for two large terms, at every place") {
    const Codecs codecs;
    constexpr std::size_t kBlock = 512;
    const std::int64_t n = kBlock * kBlock;
    const BlockFormat format = BlockFormat::parse("eden4:512");
    const WireLayout layout(format, DType::float32, n);
    Bytes wire(layout.num_bytes);
    for (std::size_t i = 0; i < kBlock * kBlock; ++i) {
      const bool is_large = i % kBlock == i / kBlock || i % kBlock == (i / kBlock + 1) % kBlock;
      wire[layout.codes_offset + i / 2] |= std::byte{is_large ? std::uint8_t{7} : std::uint8_t{5}} << (i % 2 * 4);
    }
    // 1.7265625 * 2^112: times 74 it is a little less than 2^119, where care begins; the sum is a little over 2^128.
    const std::vector<std::uint16_t> scales(kBlock, 0x77dd);
    std::memcpy(wire.data(), scales.data(), 2 * kBlock);
    Wires wires;
    wires.add(wire, {format}, 0);
    for (DType dtype : kDTypes) {
      CAPTURE(to_string(dtype));
      check_decode(codecs, wire, n, DType::float32, format, dtype, 0);
      check_sum(codecs, wires, n, 0x1p-120f, dtype, 0);
    }
    check_sum_encode(codecs, wires, n, BlockFormat::parse("int4:32"));
  }

  TEST_CASE("casts that are kept within the limits of their type, with infinities at every place") {
    const Codecs codecs;
    constexpr std::size_t kPlaces = 32;  // of a thread
    for (DType from : {DType::float32, DType::bfloat16}) {
      const std::uint32_t shift = from == DType::float32 ? 0 : 16;
      Bytes values(kPlaces * kPlaces * element_size(from));
      for (std::size_t i = 0; i < kPlaces * kPlaces; ++i) {
        std::uint32_t bits = i % kPlaces == i / kPlaces ? 0x7f800000u : 0x7f7f0000u;  // infinity, and the finite beyond
        bits = (bits | (i % 2 == 0 ? 0x80000000u : 0)) >> shift;
        std::memcpy(values.data() + i * element_size(from), &bits, element_size(from));
      }
      for (DType to : {DType::bfloat16, DType::float16}) {
        CAPTURE(to_string(from));
        CAPTURE(to_string(to));
        check_decode(codecs, values, kPlaces * kPlaces, from, BlockFormat::parse("exact"), to, 0);
      }
    }
  }

  TEST_CASE("sums all kinds of wires") {
    const Codecs codecs;
    for (const auto& mix : kMixes) {
      for (std::size_t num_wires : {1, 2, 3, 7, 13}) {
        for (std::int64_t n : {0, 1, 33, 4100, 40001}) {
          if (kSanitizers && n > 5000) continue;
          Wires wires(codecs, n, mix, num_wires);
          CAPTURE(&mix - kMixes.data());
          CAPTURE(num_wires);
          CAPTURE(n);
          for (DType dtype : kDTypes) {
            CAPTURE(to_string(dtype));
            check_sum(codecs, wires, n, 1.0f, dtype, 0);
            check_sum(codecs, wires, n, 0.3f, dtype, element_size(dtype));
          }
          for (const char* text : {"exact", "bf16", "int8:32", "int4:256", "int8:96", "int4:4096", "int8:1056",
                                   "eden3:64", "int4:128:stochastic", "fp8:4064", "eden2:128", "eden3:512"}) {
            CAPTURE(text);
            if (can_encode(wires, BlockFormat::parse(text)))
              check_sum_encode(codecs, wires, n, BlockFormat::parse(text));
          }
        }
      }
    }
  }

  TEST_CASE("sums of values at any address that end at each place of a group") {
    const Codecs codecs;
    for (DType dtype : kDTypes) {
      for (std::int64_t n = 33; n <= 80; ++n) {
        for (std::size_t offset = element_size(dtype); offset < 16; offset += test::kSanitizers ? 6 : 2) {
          if (offset % element_size(dtype) != 0) continue;
          CAPTURE(to_string(dtype));
          CAPTURE(n);
          CAPTURE(offset);
          Wires wires;
          wires.add(make_values(dtype, n, static_cast<std::uint32_t>(n)), {{}, dtype}, offset);
          check_sum(codecs, wires, n, 1.0f, dtype, 0);
          check_sum_encode(codecs, wires, n, BlockFormat::parse("int8:32"));
        }
      }
    }
  }

  TEST_CASE("sums more wires than fit a launch") {
    const Codecs codecs;
    for (const auto& mix : kMixes) {
      for (std::size_t num_wires : {84, 85, 88, 89, 300}) {
        CAPTURE(&mix - kMixes.data());
        CAPTURE(num_wires);
        const std::int64_t n = 200;
        Wires wires(codecs, n, mix, num_wires);
        check_sum(codecs, wires, n, 0.5f, DType::bfloat16, 0);
        check_sum(codecs, wires, n, 1.0f, DType::float32, 4);
        check_sum_encode(codecs, wires, n, BlockFormat::parse("int8:64"));
        check_sum_encode(codecs, wires, n, BlockFormat::parse("exact"));
        check_sum_encode(codecs, wires, n, BlockFormat::parse("eden4:32"));
        check_sum_encode(codecs, wires, n, BlockFormat::parse("eden2:256"));
      }
    }
  }

  TEST_CASE("encodes a sum in the place of one of its wires") {
    const Codecs codecs;
    for (const char* text : {"int8:64", "int4:32", "int8:2048", "eden3:32", "eden2:64", "int4:4096:stochastic",
                             "fp8:96", "exact", "bf16"}) {
      const BlockFormat format = BlockFormat::parse(text);
      for (std::int64_t n : {21, 100, 20001}) {
        CAPTURE(text);
        CAPTURE(n);
        Wires wires(codecs, n, {{{}, DType::bfloat16}, {format, DType::float32, 0.5f}, {{ElementKind::int4, 64}}}, 3);
        HostBuffer expected(WireLayout(format, DType::float32, n).num_bytes);
        const DecodeSumEncode host_job{wires.host, n, format, expected.data(), kRounding};
        codecs.host->decode_sum_encode({&host_job, 1}, {});
        DeviceBuffer residual(expected.size);
        residual.set(wires.device_memory[1].bytes());
        wires.device[1].data = residual.data();
        const DecodeSumEncode job{wires.device, n, format, residual.data(), kRounding};
        codecs.device->decode_sum_encode({&job, 1}, {});
        CHECK(residual.bytes() == expected.bytes());
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

  TEST_CASE("terms of a block that is not finite are +0 where NaNs are 0") {
    const Codecs codecs;
    Bytes minus_zeros(32 * 4), wire(16 + 32, std::byte{0xff});  // codes are -1
    for (std::size_t i = 3; i < minus_zeros.size(); i += 4) minus_zeros[i] = std::byte{0x80};
    std::fill_n(wire.begin(), 16, std::byte{0});
    wire[0] = std::byte{0xc0}, wire[1] = std::byte{0x7f};  // the scale
    Wires wires;
    wires.add(minus_zeros, {{}}, 0);
    wires.add(wire, {{ElementKind::int8, 32}, DType::float32, 1.0f, true}, 0);
    check_sum(codecs, wires, 32, 1.0f, DType::float32, 0);
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
    const char* texts[] = {"int8:128", "int4:64", "int8:2048:stochastic", "exact", "bf16", "eden3:64"};
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
      const DType dtype = kDTypes[i / 6 % 3];
      const BlockFormat format = BlockFormat::parse(texts[i % 6]);
      const std::int64_t n = i % 11 == 0 ? 0 : static_cast<std::int64_t>(i * i % 613);
      inputs.push_back(make_values(dtype, n, static_cast<std::uint32_t>(i)));
      wires_expected.push_back(encoded(codecs, inputs[i], dtype, format));
      values.emplace_back(inputs[i], i % 4 * element_size(dtype));
      wires.emplace_back(wires_expected[i].size());
      decoded.emplace_back(inputs[i].size());
      sums.emplace_back(inputs[i].size());
      recoded.emplace_back(WireLayout(format, DType::float32, n).num_bytes);
      encodes.push_back({{values[i].data(), n, dtype}, format, wires[i].data(), kRounding});
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
                         "wire: expected an address that is a multiple of 16, got 2 bytes past one", ArgumentError);
    const DecodeSum no_wires{{}, 1.0f, {values.data(), 64, DType::float32}};
    CHECK_THROWS_WITH_AS(codecs.device->decode_sum({&no_wires, 1}, {}), "wires: expected at least one, got none",
                         ArgumentError);
    const Bytes bytes = wire.bytes();
    CHECK(std::count(bytes.begin(), bytes.end(), kUntouched) == static_cast<std::ptrdiff_t>(bytes.size()));
  }
}

}  // namespace zcomm
