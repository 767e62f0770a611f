// Tests of exact values on a GPU: any number of copies to wires and back, in few launches.
#include "codec_cuda_cases.hpp"
#include "cuda_host.hpp"
#include "sanitizers.hpp"

namespace zcomm {

using namespace test;

namespace {

// Capacity of the parameters of a launch.
constexpr std::int64_t kCopiesPerLaunch = 145;
constexpr std::int64_t kSumsPerLaunch = 32;

template <class Call>
std::int64_t launches_of(Call&& call) {
  const std::int64_t before = cuda_host::calls().launches;
  call();
  return cuda_host::calls().launches - before;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

TEST_SUITE("codec on a GPU") {
  TEST_CASE("copies from any address to any, of any length") {
    const Codecs codecs;
    std::vector<std::int64_t> lengths{4096, 4100, 16384 + 8191};
    for (std::int64_t n = 1; n <= 41; ++n) lengths.push_back(n);
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const std::size_t step = element_size(dtype);
      for (const std::int64_t n : lengths) {
        if (kSanitizers && n > 4100) continue;
        const Bytes values = make_values(dtype, n, static_cast<std::uint32_t>(n));
        for (std::size_t from = 0; from < 16; from += step) {
          for (std::size_t to = 0; to < 16; to += n < 100 ? step : 6 * step) {
            CAPTURE(to_string(dtype));
            CAPTURE(n);
            CAPTURE(from);
            CAPTURE(to);
            const DeviceBuffer source(values, from), target(values.size(), to);
            const Decode job{{source.data(), {}, dtype}, {target.data(), n, dtype}};
            codecs.device->decode({&job, 1}, {});
            CHECK(target.bytes() == values);
          }
        }
      }
    }
  }

  TEST_CASE("any number of values that are sent as they are take a launch for each 145 of them") {
    const Codecs codecs;
    const BlockFormat bf16 = BlockFormat::parse("bf16");
    constexpr std::int64_t kElements = 37;  // their wires have zeros at the end
    for (const std::int64_t num_jobs : {1, 145, 146, 700}) {
      CAPTURE(num_jobs);
      std::vector<Bytes> values;
      std::vector<DeviceBuffer> sources, wires, targets, sums;
      std::vector<Encode> encodes;
      std::vector<Decode> decodes;
      std::vector<Wire> terms;
      std::vector<DecodeSumEncode> decode_sum_encodes;
      for (std::int64_t i = 0; i < num_jobs; ++i) {
        values.push_back(make_values(DType::float32, kElements, static_cast<std::uint32_t>(i)));
        sources.emplace_back(values.back(), static_cast<std::size_t>(i) % 4 * 4);
        wires.emplace_back(wire_bytes({}, DType::float32, kElements));
        targets.emplace_back(values.back().size(), static_cast<std::size_t>(i) % 3 * 4);
        sums.emplace_back(wire_bytes(bf16, DType::float32, kElements));
        const ConstTensorView source{sources.back().data(), kElements, DType::float32};
        encodes.push_back({source, {}, wires.back().data(), kRounding});
        decodes.push_back(
            {{wires.back().data(), {}, DType::float32}, {targets.back().data(), kElements, DType::float32}});
        terms.push_back({wires.back().data(), {}, DType::float32});
      }
      for (std::size_t i = 0; i < terms.size(); ++i) {
        decode_sum_encodes.push_back({{&terms[i], 1}, kElements, bf16, sums[i].data()});
      }
      CHECK(launches_of([&] { codecs.device->encode(encodes, {}); }) == divide_up(num_jobs, kCopiesPerLaunch));
      CHECK(launches_of([&] { codecs.device->decode(decodes, {}); }) == divide_up(num_jobs, kCopiesPerLaunch));
      CHECK(launches_of([&] { codecs.device->decode_sum_encode(decode_sum_encodes, {}); }) ==
            divide_up(num_jobs, kSumsPerLaunch) + divide_up(num_jobs, kCopiesPerLaunch));
      for (std::size_t i = 0; i < values.size(); ++i) {
        CHECK(wires[i].bytes() == encoded(codecs, values[i], DType::float32, {}));
        CHECK(targets[i].bytes() == values[i]);
        CHECK(sums[i].bytes() == encoded(codecs, values[i], DType::float32, bf16));
      }
    }
  }
}

}  // namespace zcomm
