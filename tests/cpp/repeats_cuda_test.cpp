// Tests of sums that repeat at constant distances, such as those for each node: few launches, and the bits of the host.
#include <numeric>
#include <string_view>

#include "codec_cuda_cases.hpp"
#include "cuda_host.hpp"
#include "sanitizers.hpp"

namespace zcomm {

using namespace test;

namespace {

// A job whose addresses are offsets in one block of memory.
struct Job {
  std::int64_t num_elements;
  BlockFormat format;
  std::size_t out;
  std::vector<Wire> wires;  // without their data
  std::vector<std::size_t> places;
  Rounding rounding = {};
};

// Jobs, and the memory that they read and write.
class Batch {
 public:
  std::size_t take(std::size_t num_bytes) { return std::exchange(size_, size_ + (num_bytes + 15) / 16 * 16); }
  std::size_t take(BlockFormat format, std::int64_t num_elements) {
    return take(wire_bytes(format, DType::float32, num_elements));
  }
  std::vector<Job> jobs;

  // Runs the jobs on both codecs, compares all of the memory, and returns the number of launches.
  std::int64_t launches(const Codecs& codecs) const {
    Bytes contents(size_);
    std::minstd_rand random(1);
    for (std::size_t i = 0; i + 1 < size_; i += 2) {  // scales, values and codes of like size
      const std::uint32_t bits = random();
      const auto half = static_cast<std::uint16_t>((bits & 0x807fu) | ((120u + (bits >> 20) % 8) << 7));
      std::memcpy(&contents[i], &half, 2);
    }
    HostBuffer host(contents);
    DeviceBuffer device(contents);
    run(*codecs.host, host.data());
    const std::int64_t before = cuda_host::calls().launches;
    run(*codecs.device, device.data());
    const std::int64_t launches = cuda_host::calls().launches - before;
    const bool is_equal = device.bytes() == host.bytes();
    CHECK(is_equal);
    return launches;
  }

 private:
  void run(const Codec& codec, std::byte* memory) const {
    std::vector<std::vector<Wire>> wires;
    std::vector<DecodeSumEncode> made;
    for (const Job& job : jobs) {
      wires.push_back(job.wires);
      for (std::size_t i = 0; i < job.places.size(); ++i) wires.back()[i].data = memory + job.places[i];
    }
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const Job& job = jobs[i];
      made.push_back({wires[i], job.num_elements, job.format, memory + job.out, job.rounding});
    }
    codec.decode_sum_encode(made, {});
  }

  std::size_t size_ = 0;
};

struct Shape {
  int num_nodes = 64;
  int own_node = 0;
  DType dtype = DType::bfloat16;
  BlockFormat intra = BlockFormat::parse("int8:128");
  BlockFormat inter = BlockFormat::parse("int4:128");
  std::vector<std::int64_t> segments = {1000};
};

// Sums of a reduce-scatter over nodes of 8 ranks: of each other node's slot, seven wires and the rank's own values.
Batch sums_over_nodes(const Shape& shape) {
  constexpr int kRanks = 8, kLocal = 3;
  const std::int64_t length = std::accumulate(shape.segments.begin(), shape.segments.end(), std::int64_t{0});
  std::size_t in_bytes = 0, out_bytes = 0;
  for (const std::int64_t n : shape.segments) {
    in_bytes += wire_bytes(shape.intra, shape.dtype, n);
    out_bytes += wire_bytes(shape.inter, DType::float32, n);
  }
  const auto nodes = static_cast<std::size_t>(shape.num_nodes), width = element_size(shape.dtype);
  Batch batch;
  const std::size_t values = batch.take(nodes * kRanks * static_cast<std::size_t>(length) * width);
  const std::size_t in = batch.take(kRanks * nodes * in_bytes), out = batch.take(nodes * out_bytes);
  for (std::size_t node = 0; node < nodes; ++node) {
    if (node == static_cast<std::size_t>(shape.own_node)) continue;
    std::size_t in_place = in + node * in_bytes, out_place = out + node * out_bytes;
    std::size_t slot = values + (node * kRanks + kLocal) * static_cast<std::size_t>(length) * width;
    for (const std::int64_t n : shape.segments) {
      Job job{n, shape.inter, out_place, {}, {}};
      for (std::size_t local = 0; local < kRanks; ++local) {
        const bool is_own = local == kLocal;
        job.wires.push_back({nullptr, is_own ? BlockFormat{} : shape.intra, shape.dtype});
        job.places.push_back(is_own ? slot : in_place + local * nodes * in_bytes);
      }
      batch.jobs.push_back(job);
      in_place += wire_bytes(shape.intra, shape.dtype, n);
      out_place += wire_bytes(shape.inter, DType::float32, n);
      slot += static_cast<std::size_t>(n) * width;
    }
  }
  return batch;
}

constexpr std::int64_t kSumsOf8PerLaunch = 10;

}  // namespace

TEST_SUITE("codec on a GPU") {
  TEST_CASE("sums of 8 ranks for 63 other nodes are one launch") {
    const Codecs codecs;
    for (const int own_node : {0, 1, 31, 62, 63}) {
      CAPTURE(own_node);
      CHECK(sums_over_nodes({.own_node = own_node}).launches(codecs) == 1);
    }
  }

  TEST_CASE("sums for other nodes have the bits of the host, for every shape, dtype and format") {
    const Codecs codecs;
    for (const int num_nodes : {2, 3, 5, 16}) {
      for (const DType dtype : kDTypes) {
        for (const char* intra : {"int8:128", "int4:32", "int8:96", "fp8:96", "eden3:128", "bf16", "exact"}) {
          for (const char* inter : {"int4:128", "int8:96", "int8:2048", "fp8:64", "eden2:64"}) {
            if (std::string_view(intra) == "eden3:128" && std::string_view(inter) == "int8:96") continue;  // refused
            for (const std::int64_t n : {1, 33, 1030, 5000}) {
              if (kSanitizers && n > 1030) continue;
              CAPTURE(num_nodes);
              CAPTURE(to_string(dtype));
              CAPTURE(intra);
              CAPTURE(inter);
              CAPTURE(n);
              const Batch batch =
                  sums_over_nodes({num_nodes, 1, dtype, BlockFormat::parse(intra), BlockFormat::parse(inter), {n}});
              CHECK(batch.launches(codecs) == 1);
            }
          }
        }
      }
    }
  }

  TEST_CASE("several segments of a chunk are summed in rounds, also if some are alike, or are cut in pieces") {
    const Codecs codecs;
    for (const std::vector<std::int64_t>& segments :
         {std::vector<std::int64_t>{500, 77}, {77, 500, 500, 1}, {500, 500, 77}, {128, 128}, {20000, 40001, 20000}}) {
      CAPTURE(segments.size());
      Shape shape{.num_nodes = 20, .own_node = 7, .segments = segments};
      if (kSanitizers && segments[0] > 1000) shape.num_nodes = 8;
      const auto num_jobs = (shape.num_nodes - 1) * static_cast<std::int64_t>(segments.size());
      const std::int64_t launches = sums_over_nodes(shape).launches(codecs);
      CHECK(launches <= 2);
      CHECK(launches < (num_jobs + kSumsOf8PerLaunch - 1) / kSumsOf8PerLaunch);
    }
  }

  TEST_CASE("sums that are almost repeats are summed for themselves") {
    const Codecs codecs;
    const std::vector<std::function<void(Batch&, Job&)>> changes = {
        [](Batch& batch, Job& job) { job.out = batch.take(job.format, job.num_elements); },
        [](Batch&, Job& job) { std::swap(job.places[0], job.places[7]); },
        [](Batch&, Job& job) { job.places[2] -= 16; },
        [](Batch&, Job& job) { job.places[3] += 2; },
        [](Batch&, Job& job) { job.places[3] = job.places[3] / 4 * 4 + 2; },
        [](Batch&, Job& job) { job.num_elements -= 1; },
        [](Batch&, Job& job) { job.wires[1].factor = 0.5f; },
        [](Batch&, Job& job) { job.wires[1].nan_is_zero = true; },
        [](Batch&, Job& job) { job.wires[4].format = BlockFormat::parse("int8:96"); },
        [](Batch&, Job& job) { job.wires[4].format = BlockFormat::parse("int4:128"); },
        [](Batch&, Job& job) { job.wires[4].format = BlockFormat::parse("eden2:128"); },
        [](Batch&, Job& job) { job.wires[3].dtype = DType::float16; },
        [](Batch&, Job& job) { job.format = BlockFormat::parse("int4:256"); },
        [](Batch&, Job& job) { job.wires.pop_back(), job.places.pop_back(); },
        [](Batch&, Job& job) { std::swap(job.wires[2], job.wires[3]), std::swap(job.places[2], job.places[3]); },
    };
    for (std::size_t i = 0; i < changes.size(); ++i) {
      for (const std::size_t place : {0, 1, 2, 7, 14}) {
        CAPTURE(i);
        CAPTURE(place);
        Batch batch = sums_over_nodes({.num_nodes = 16, .segments = {1030}});
        batch.take(4096);
        changes[i](batch, batch.jobs[place]);
        CHECK(batch.launches(codecs) == 1);
      }
    }
  }

  TEST_CASE("sums with an input that all share, at shrinking addresses, or of random bits do not repeat") {
    const Codecs codecs;
    const std::int64_t not_repeated = (15 + kSumsOf8PerLaunch - 1) / kSumsOf8PerLaunch;
    Batch shared = sums_over_nodes({.num_nodes = 16}), backwards = shared;
    for (Job& job : shared.jobs) job.places[5] = shared.jobs[0].places[5];
    CHECK(shared.launches(codecs) == not_repeated);
    std::reverse(backwards.jobs.begin(), backwards.jobs.end());
    CHECK(backwards.launches(codecs) == not_repeated);
    Batch random = sums_over_nodes({.num_nodes = 16, .inter = BlockFormat::parse("int4:128:stochastic")});
    for (std::size_t i = 0; i < random.jobs.size(); ++i) random.jobs[i].rounding = {i, 0};
    CHECK(random.launches(codecs) == not_repeated);
  }

  TEST_CASE("any mix of repeats has the bits of the host") {
    const Codecs codecs;
    std::minstd_rand random(5);
    for (int turn = 0; turn < (kSanitizers ? 20 : 200); ++turn) {
      CAPTURE(turn);
      Shape shape{.num_nodes = 2 + static_cast<int>(random() % 20), .segments = {}};
      for (std::size_t i = 0; i <= random() % 4; ++i) shape.segments.push_back(1 + random() % 3 * 50);
      Batch batch = sums_over_nodes(shape);
      for (std::size_t i = 0; i < random() % 4; ++i) {
        const auto from = batch.jobs.begin() + random() % static_cast<std::ptrdiff_t>(batch.jobs.size());
        std::rotate(batch.jobs.begin(), from, from + 1);
      }
      batch.launches(codecs);
    }
  }
}

}  // namespace zcomm
