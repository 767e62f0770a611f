// Tests of the time model of collectives on GPUs: it runs their own schedule, and justifies the default chunks.
#include <doctest/doctest.h>

#include "gpu_model/machines.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using model::Assumptions;
using model::Clock;
using model::Kind;
using model::Machine;

constexpr std::size_t kMiB = std::size_t{1} << 20;

Clock by_default(const Machine& machine, Kind kind, std::size_t num_bytes) {
  return model::simulate(machine, kind, num_bytes, default_gpu_chunk_bytes(machine.size()));
}

Machine machine_of(const std::string& name) {
  for (const Machine& machine : model::machines()) {
    if (machine.name == name) return machine;
  }
  throw ArgumentError("no machine " + name);
}

}  // namespace

TEST_CASE("gpu model: a call takes a group per chunk, up to two more with two hops, an all_reduce five, as over NCCL") {
  for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce}) {
    for (const int num_chunks : {1, 2, 8}) {
      const std::size_t num_bytes = 32 * kMiB;
      const auto groups = [&](const char* name) {
        const Machine machine = machine_of(name);
        const auto ranks = static_cast<std::size_t>(machine.size());
        return model::simulate(machine, kind, num_bytes, num_bytes / ranks / static_cast<std::size_t>(num_chunks))
            .num_groups;
      };
      const bool is_both = kind == Kind::all_reduce;
      const int delay = kind != Kind::all_gather && num_chunks >= 4 ? 2 : 1;  // of the second hop, in groups
      CHECK(groups("8, NVLink") == (is_both ? std::min(num_chunks + 2, 2 * num_chunks) : num_chunks));
      CHECK(groups("2x8, NVLink, 400 Gbit/s") ==
            (is_both ? std::min(num_chunks + delay + 3, 2 * num_chunks + 2) : num_chunks + delay));
    }
  }
}

TEST_CASE("gpu model: a group has a send and a receive for each peer and hop") {
  for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter}) {
    for (const char* name : {"2x8, NVLink, 400 Gbit/s", "16x8, NVLink, 400 Gbit/s", "64x8, NVLink, 400 Gbit/s"}) {
      const Machine machine = machine_of(name);
      const int in_node = machine.ranks_per_node - 1;
      // A gather sends own slots, and those of other nodes, to each rank of the node.
      const int num_sends = machine.nodes - 1 + (kind == Kind::all_gather ? 2 : 1) * in_node;
      CHECK(by_default(machine, kind, 1024 * kMiB).most_messages == static_cast<std::size_t>(2 * num_sends));
    }
  }
}

// One chunk of one hop, by hand: two kernels, a group and its wait.
TEST_CASE("gpu model: the time of a call without bytes is that of its launches") {
  Assumptions assumed;
  assumed.memory_rate = assumed.instruction_rate = 1e30;
  const Machine machine{"", 1, 8, 1e30, 0};
  const Clock clock = model::simulate(machine, Kind::reduce_scatter, kMiB, kMiB, assumed);
  const double queued = assumed.launch_host + 2 * assumed.event_host + assumed.group_host + 14 * assumed.message_host;
  const double moved = queued + assumed.group_start + 7 * assumed.peer_start;
  CHECK(clock.end() == doctest::Approx(moved + assumed.kernel_start));
}

// The bytes of one hop by hand, where all else is free: 15 of 16 shards leave, one byte and a scale per 128 each.
TEST_CASE("gpu model: the time of the links is that of the bytes that leave") {
  Assumptions assumed{};
  assumed = {.launch_host = 0,
             .event_host = 0,
             .group_host = 0,
             .message_host = 0,
             .kernel_start = 0,
             .group_start = 0,
             .peer_start = 0,
             .network_start = 0,
             .memory_rate = 1e30,
             .instruction_rate = 1e30};
  const Machine machine{"", 1, 16, 100e9, 0};
  const double elements = 64.0 * static_cast<double>(kMiB) / 2 / 16;
  const double bytes = 15 * elements * (1 + 2.0 / 128);
  const double seconds = model::simulate(machine, Kind::reduce_scatter, 64 * kMiB, 8 * kMiB, assumed).end();
  CHECK(seconds == doctest::Approx(bytes / (100e9 * assumed.intra_share)));
}

TEST_CASE("gpu model: default chunks are within 10 % of the best, and scratch does not grow with the world") {
  for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter}) {
    for (const Machine& machine : model::machines()) {
      for (const std::size_t mebibytes : model::kMebibytes) {
        CAPTURE(machine.name);
        CAPTURE(mebibytes);
        const std::size_t num_bytes = mebibytes * kMiB;
        double best = 1;
        for (const std::size_t num_chunks : {1, 2, 3, 4, 6, 8, 12, 16}) {
          const std::size_t chunk_bytes = num_bytes / static_cast<std::size_t>(machine.size()) / num_chunks;
          best =
              std::min(best, model::simulate(machine, kind, num_bytes, std::max<std::size_t>(chunk_bytes, 512)).end());
        }
        CHECK(by_default(machine, kind, num_bytes).end() <= 1.1 * best);
        CHECK(default_gpu_chunk_bytes(machine.size()) * static_cast<std::size_t>(machine.size()) == 128 * kMiB);
      }
    }
  }
}

TEST_CASE("gpu model: an all_reduce is never slower than a reduce_scatter and an all_gather, one after the other") {
  for (const Machine& machine : model::machines()) {
    for (const std::size_t mebibytes : {1, 128, 256, 512, 1024, 4096}) {
      CAPTURE(machine.name);
      CAPTURE(mebibytes);
      const double in_turn = by_default(machine, Kind::all_reduce_in_turn, mebibytes * kMiB).end();
      CHECK(by_default(machine, Kind::all_reduce, mebibytes * kMiB).end() <= 1.001 * in_turn);
    }
  }
}

// docs/performance.md advises `min_bytes` of these sizes; what is smaller is faster exact.
TEST_CASE("gpu model: from the advised sizes on no call is slower than exact NCCL by more than 5 %") {
  const std::vector<std::pair<const char*, std::size_t>> advised{{"8, NVLink", 128},
                                                                 {"2x8, NVLink, 400 Gbit/s", 64},
                                                                 {"2x8, NVLink, 100 Gbit/s", 16},
                                                                 {"16x8, NVLink, 400 Gbit/s", 1},
                                                                 {"16x8, NVLink, 100 Gbit/s", 1},
                                                                 {"8, PCIe 4", 4},
                                                                 {"2x8, PCIe 4, 100 Gbit/s", 4}};
  for (const auto& [name, least] : advised) {
    for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter}) {
      for (const std::size_t mebibytes : model::kMebibytes) {
        if (mebibytes < least) continue;
        CAPTURE(name);
        CAPTURE(mebibytes);
        const Machine machine = machine_of(name);
        const double exact = model::exact_seconds(machine, mebibytes * kMiB);
        CHECK(by_default(machine, kind, mebibytes * kMiB).end() <= 1.05 * exact);
      }
    }
  }
}

// Bytes of the links by hand, where starts are free: what a reduction does with a chunk is hidden behind other chunks.
TEST_CASE("gpu model: a reduce_scatter of many chunks keeps the links busy while it sums") {
  Assumptions assumed;
  assumed.launch_host = assumed.event_host = assumed.group_host = assumed.message_host = 0;
  assumed.kernel_start = assumed.group_start = assumed.peer_start = assumed.network_start = 0;
  const Machine machine{"", 2, 8, 500e9, 1e12};
  const double elements = 4096.0 * static_cast<double>(kMiB) / 2;  // one byte and a scale per 128 each inside a node
  const double links = elements * 7 / 8 * (1 + 2.0 / 128) / (500e9 * assumed.intra_share);
  const double seconds =
      model::simulate(machine, Kind::reduce_scatter, 4096 * kMiB, default_gpu_chunk_bytes(16), assumed).end();
  CHECK(links / seconds >= 0.95);
}

TEST_CASE("gpu model: a gather of a layer of 70 B parameters over 64 nodes gains 1.6 times") {
  const Machine machine = machine_of("64x8, NVLink, 400 Gbit/s");
  constexpr std::size_t kLayerBytes = std::size_t{855'650'304} * 2;
  CHECK(model::exact_seconds(machine, kLayerBytes) >= 1.6 * by_default(machine, Kind::all_gather, kLayerBytes).end());
}

TEST_CASE("gpu model: between two nodes over 100 Gbit/s large calls gain 1.7 and 3 times") {
  const Machine machine = machine_of("2x8, NVLink, 100 Gbit/s");
  for (const std::size_t mebibytes : {256, 1024}) {
    const double exact = model::exact_seconds(machine, mebibytes * kMiB);
    CHECK(exact / by_default(machine, Kind::all_gather, mebibytes * kMiB).end() >= 1.7);
    CHECK(exact / by_default(machine, Kind::reduce_scatter, mebibytes * kMiB).end() >= 3);
  }
}

}  // namespace zcomm
