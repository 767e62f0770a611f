#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls.hpp"
#include "collectives/lossless_preparation.hpp"
#include "half_weights.hpp"
#include "ranks.hpp"
#include "unchecked_transport.hpp"
#include "zcomm/call.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;

using test::Halves;
using test::Unchecked;
using test::weights_of;

TensorView view(Halves& values, DType dtype = DType::bfloat16) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), dtype};
}

// One rank of a gather: slots of these lengths, and its kept values.
struct Rank {
  Rank(Communicator& communicator_of_rank, const std::vector<std::size_t>& lengths,
       DType dtype_of_slots = DType::bfloat16, const std::vector<Segment<BlockFormat>>& segments = {})
      : communicator(communicator_of_rank), rank(communicator.rank()), dtype(dtype_of_slots) {
    for (const std::size_t length : lengths) slots.emplace_back(length);
    plan = std::make_shared<const LosslessPlan>(communicator.world(), shape_of(views()), segments);
    memory.resize(plan->secondary_bytes() / kWireAlignment + 1);
    memory.back().bytes[0] = kBeyond;
    kept->memory = {memory.data()->bytes, plan->secondary_bytes()};
    operation = make_lossless_gather(plan, kept);
  }

  std::vector<TensorView> views() {
    std::vector<TensorView> views;
    for (Halves& slot : slots) views.push_back(view(slot, dtype));
    return views;
  }
  // Returns a view for each segment of each slot.
  std::vector<TensorView> segment_views() {
    std::vector<TensorView> pieces;
    for (const TensorView& slot : views()) {
      std::int64_t begin = 0;
      for (const Segment<BlockFormat>& segment : plan->segments()) {
        pieces.push_back(slot.slice(begin, segment.num_elements));
        begin += segment.num_elements;
      }
    }
    return pieces;
  }
  void clear() {
    for (Halves& slot : slots) std::fill(slot.begin(), slot.end(), kCleared);
  }
  CallStats gather(int step) {
    clear();
    Halves shard = weights_of(rank, slots[static_cast<std::size_t>(rank)].size(), step);
    const ConstTensorView own = view(shard, dtype);
    const std::vector<TensorView> outputs = segment_views();
    return communicator.run(*operation, {{&own, 1}, outputs}, 20s);
  }
  CallStats gather_again() {
    clear();
    const std::vector<TensorView> outputs = segment_views();
    return communicator.run(*operation, {{}, outputs}, 20s);
  }
  void check(int step) const {
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot] != weights_of(static_cast<int>(slot), slots[slot].size(), step)) {
        throw Error("rank " + std::to_string(rank) + " has another slot " + std::to_string(slot));
      }
    }
    if (memory.back().bytes[0] != kBeyond) throw Error("written past the end");
  }

  static constexpr std::byte kBeyond{0x5a};
  static constexpr std::uint16_t kCleared = 0xdead;
  struct alignas(kWireAlignment) Unit {
    std::byte bytes[kWireAlignment];
  };
  Communicator& communicator;
  int rank;
  DType dtype;
  std::vector<Halves> slots;
  std::shared_ptr<const LosslessPlan> plan;
  std::vector<Unit> memory;
  std::shared_ptr<SecondaryShard> kept = std::make_shared<SecondaryShard>();
  GatherPtr operation;
};

// Calls body(Rank&) on every rank. Rethrows the first failure, or stores each rank's in `failures`.
void run(const std::vector<std::unique_ptr<Communicator>>& communicators, const std::vector<std::size_t>& lengths,
         const std::function<void(Rank&)>& body, std::vector<std::string>* failures = nullptr,
         DType dtype = DType::bfloat16, const std::vector<Segment<BlockFormat>>& segments = {}) {
  test::run_ranks(static_cast<int>(communicators.size()), [&](int rank) {
    Rank state(*communicators[static_cast<std::size_t>(rank)], lengths, dtype, segments);
    if (failures == nullptr) {
      body(state);
      return;
    }
    try {
      body(state);
    } catch (const std::exception& error) {
      (*failures)[static_cast<std::size_t>(rank)] = error.what();
    }
  });
}

// Returns each rank's failure in a body that fails.
std::vector<std::string> failures_of(const std::vector<std::unique_ptr<Communicator>>& communicators,
                                     const std::function<void(Rank&)>& body) {
  std::vector<std::string> failures(communicators.size());
  run(communicators, std::vector<std::size_t>(communicators.size(), 5000), body, &failures);
  return failures;
}

// Makes communicators; `change` is applied to the messages of rank 3.
std::vector<std::unique_ptr<Communicator>> unchecked(const std::vector<int>& ids, const Unchecked::Change& change) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(static_cast<int>(ids.size()))) {
    const bool changes = transport->rank() == 3;
    communicators.push_back(
        std::make_unique<Communicator>(std::make_unique<Unchecked>(std::move(transport), changes ? change : nullptr),
                                       Topology(ids), make_cpu_codec(), make_host_workspace()));
  }
  return communicators;
}

void check_bytes(const CallStats& stats, LinkBytes planned) {
  if (LinkBytes{stats.intra_node_bytes, stats.inter_node_bytes} == planned) return;
  throw Error("sent " + std::to_string(stats.intra_node_bytes) + " and " + std::to_string(stats.inter_node_bytes) +
              " bytes, planned " + std::to_string(planned.intra_node) + " and " + std::to_string(planned.inter_node));
}

// Checks the bytes of `rank`'s last gather, whose differences have no size known in advance.
void check_bytes(const Rank& rank, const CallStats& stats) {
  const std::size_t headers = kLosslessHeaderBytes * static_cast<std::size_t>(rank.plan->num_chunks());
  const std::size_t sent = rank.kept->sent_bytes;
  check_bytes(stats, rank.plan->bytes(sent == 0 ? 0 : sent - headers));
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const std::vector<int> kTwoNodes{0, 0, 1, 1};

}  // namespace

TEST_CASE("lossless gathers: every value on every rank, again and again, for every shape, size and chunk") {
  const std::vector<std::vector<int>> shapes{{1}, {3}, {1, 1, 1}, {2, 2}, {3, 1}, {1, 2, 3}, {2, 2, 2}};
  for (const std::vector<int>& shape : shapes) {
    for (const bool interleaved : {false, true}) {
      for (const std::size_t length : {0, 1, 33, 4096, 10007}) {
        for (const bool uneven : {false, true}) {
          const std::vector<int> ids = test::node_ids(shape, interleaved);
          std::vector<std::size_t> lengths(ids.size(), length);
          for (std::size_t rank = 1; uneven && rank < ids.size(); ++rank) lengths[rank] = length / (rank + 1);
          CAPTURE(ids.size());
          CAPTURE(length);
          const auto body = [&](Rank& rank) {
            for (int step = 0; step < 3; ++step) {
              check_bytes(rank, rank.gather(step));
              rank.check(step);
              if (rank.kept->generation != static_cast<std::uint64_t>(step + 1)) throw Error("another generation");
              check_bytes(rank.gather_again(), rank.plan->bytes_from_secondary());
              rank.check(step);
            }
          };
          run(test::make_communicators(ids, 8192), lengths, body);
          run(test::make_communicators(ids, 8192), lengths, body, nullptr, DType::byte_pairs);
          if (uneven || length < 2) continue;
          const auto rest = static_cast<std::int64_t>(length) - 8;
          run(test::make_communicators(ids, 8192), lengths, body, nullptr, DType::bfloat16,
              {{7, {}}, {rest, {}}, {1, {}}});
        }
      }
    }
  }
}

TEST_CASE("lossless gathers: bytes between nodes are whole values once, then what has changed") {
  constexpr std::size_t kLength = 100'000;
  for (const std::vector<int>& ids : {kTwoNodes, {0, 1, 2, 3}, {0, 0, 0, 1}}) {
    const Topology topology(ids);
    run(test::make_communicators(ids, 1 << 16), std::vector<std::size_t>(4, kLength), [&](Rank& rank) {
      const auto receivers = static_cast<std::size_t>(topology.num_nodes() - 1);
      const std::size_t headers = kLosslessHeaderBytes * static_cast<std::size_t>(rank.plan->num_chunks());
      const auto expect = [&](const CallStats& stats, std::size_t least, std::size_t most) {
        if (stats.inter_node_bytes != receivers * rank.kept->sent_bytes)
          throw Error("bytes are not those that were sent");
        if (rank.kept->sent_bytes < least || rank.kept->sent_bytes > most) {
          throw Error("sent " + std::to_string(rank.kept->sent_bytes) + " bytes");
        }
      };
      expect(rank.gather(0), 2 * kLength + headers, 2 * kLength + headers);
      expect(rank.gather(1), kLength / 8 + headers, kLength / 2);  // one of three values each: 1.6 bits of entropy
      expect(rank.gather(1), headers, headers + kLength / 500);    // nothing
      rank.kept->generation = 0;
      expect(rank.gather(2), 2 * kLength + headers, 2 * kLength + headers);
      rank.check(2);
    });
  }
}

TEST_CASE("lossless gathers: what was written to where values are kept is found by all who would get it") {
  for (const bool at_owner : {false, true}) {
    for (const std::size_t byte : {4000, 4001}) {
      // This is part of an exponent. Differences have other lengths for its holder, and its owner sends it whole.
      if (byte == 4001 && at_owner) continue;
      bool passed_on = false;  // by rank 1, to rank 0
      const auto failures = failures_of(test::make_communicators(kTwoNodes), [&](Rank& rank) {
        rank.gather(0);
        rank.gather(1);
        // Rank 1 holds slot 3 for its node.
        if (rank.rank == (at_owner ? 3 : 1)) rank.kept->memory[rank.plan->secondary_offset(3) + byte] ^= std::byte{1};
        try {
          rank.gather(2);
        } catch (const TransportError&) {
          if (rank.rank == 0) passed_on = rank.slots[3] != Halves(5000, Rank::kCleared);
          throw;
        }
      });
      CHECK_FALSE(passed_on);
      // Slot 3 comes to rank 0 by way of rank 1. The others have it, and may be done before these give up.
      for (const int rank : {0, 1}) {
        CHECK(contains(failures[static_cast<std::size_t>(rank)],
                       "slot 3: what this rank has made of generation 2 is not generation 3 of rank 3"));
      }
    }
  }
  const auto failures = failures_of(test::make_communicators(kTwoNodes), [](Rank& rank) {
    rank.gather(0);
    if (rank.rank == 1) rank.kept->memory[0] ^= std::byte{1};
    rank.gather_again();
  });
  CHECK(contains(failures[0], "slot 1: generation 1 was written to on rank 1"));
  CHECK(contains(failures[1], "slot 1: generation 1 was written to on rank 1"));
}

TEST_CASE("lossless gathers: ranks at other generations say so") {
  for (const bool compares : {true, false}) {
    const auto failures =
        failures_of(compares ? test::make_communicators(kTwoNodes) : unchecked(kTwoNodes, nullptr), [](Rank& rank) {
          rank.gather(0);
          rank.gather(1);
          if (rank.rank == 3) rank.kept->generation = 0;
          rank.gather(2);
        });
    for (const std::string& failure : failures) {
      CHECK(contains(failure, "generation 0"));
      CHECK(contains(failure, "generation 2"));
      CHECK(contains(failure, compares ? "ranks called different things" : "differences of slot"));
    }
  }
  // One gathers what it has, the others what has changed.
  const auto failures = failures_of(test::make_communicators(kTwoNodes), [](Rank& rank) {
    rank.gather(0);
    if (rank.rank == 3) rank.gather_again();
    rank.gather(1);
  });
  for (const int rank : {2, 3}) {
    CHECK(contains(failures[static_cast<std::size_t>(rank)],
                   "gather_secondary bfloat16[4 x 5000] by differences, of weights that have not changed"));
  }
  for (const std::string& failure : failures) CHECK_FALSE(failure.empty());
}

TEST_CASE("lossless gathers: after a failure whole values are sent, to the same memory") {
  const auto first = test::make_communicators(kTwoNodes), second = test::make_communicators(kTwoNodes);
  std::vector<std::string> failures(4);
  test::run_ranks(4, [&](int number) {
    const auto index = static_cast<std::size_t>(number);
    const std::vector<std::size_t> lengths(4, 5000);
    Rank rank(*first[index], lengths);
    rank.gather(0);
    if (number == 1) rank.kept->memory[rank.plan->secondary_offset(3)] ^= std::byte{1};
    try {
      rank.gather(1);
      rank.gather(2);
    } catch (const TransportError& error) {
      failures[index] = error.what();
    }
    if (rank.kept->generation == 2) rank.kept->generation = 0;  // done before the others gave up
    Rank later(*second[index], lengths);
    later.kept = rank.kept;
    later.operation = make_lossless_gather(later.plan, later.kept);
    for (int step = 3; step < 5; ++step) {
      later.gather(step);
      later.check(step);
    }
    if (rank.kept->generation != 2) throw Error("another generation");
  });
  for (const std::string& failure : failures) CHECK_FALSE(failure.empty());
}

TEST_CASE("lossless gathers: where sizes must be known, they are exchanged ahead, and no byte more is sent") {
  for (const std::vector<int>& ids : {kTwoNodes, {0, 0, 0, 1}, {0, 0}}) {
    std::vector<std::unique_ptr<Communicator>> communicators;
    for (auto& transport : make_local_transports(static_cast<int>(ids.size()))) {
      communicators.push_back(
          std::make_unique<Communicator>(std::make_unique<Unchecked>(std::move(transport), nullptr, true),
                                         Topology(ids), make_cpu_codec(), make_host_workspace(), 8192));
    }
    run(communicators, std::vector<std::size_t>(ids.size(), 10007), [](Rank& rank) {
      for (int step = 0; step < 4; ++step) {
        CallStats stats;
        if (step % 2 == 1) {
          Halves shard = weights_of(rank.rank, 10007, step);
          const ConstTensorView own = view(shard);
          const OperationPtr preparation = make_preparation({rank.operation});
          stats = rank.communicator.run(*preparation, {{&own, 1}, {}}, 20s);
        }
        const CallStats gather = rank.gather(step);
        stats.intra_node_bytes += gather.intra_node_bytes;
        stats.inter_node_bytes += gather.inter_node_bytes;
        check_bytes(rank, stats);
        rank.check(step);
        check_bytes(rank.gather_again(), rank.plan->bytes_from_secondary());
        rank.check(step);
      }
    });
  }
}

TEST_CASE("lossless gathers: the same generation of other values is found") {
  const auto failures = failures_of(test::make_communicators(kTwoNodes), [](Rank& rank) {
    rank.gather(0);
    if (rank.rank == 3) ++*rank.kept->hashes->hash(3, 0);
    rank.gather(1);
  });
  CHECK(contains(failures[1], "slot 3: generation 1 of this rank and of rank 3 are not the same"));
}

TEST_CASE("lossless gathers: damaged messages are errors") {
  const auto failure = [](const std::function<void(std::vector<std::byte>&)>& change) {
    bool on = false;
    const auto failures = failures_of(unchecked(kTwoNodes,
                                                [&](std::vector<std::byte>& message) {
                                                  if (on) change(message);
                                                }),
                                      [&](Rank& rank) {
                                        rank.gather(0);
                                        if (rank.rank == 3) on = true;  // this thread alone sends through it
                                        rank.gather(1);
                                      });
    return failures[1];
  };
  // Inside the node it sends whole slots.
  const auto in_difference = [](std::size_t offset, std::byte flipped) {
    return [=](std::vector<std::byte>& message) {
      if (message.size() < 5000) message[offset] ^= flipped;
    };
  };
  const auto in_header = [&](std::size_t offset) { return in_difference(offset, std::byte{0xff}); };
  CHECK(contains(failure(in_header(0)), "differences of slot 3: difference: expected a header of magic"));
  CHECK(contains(failure(in_header(14)), "slot 3: rank 3 announced"));
  CHECK(contains(failure(in_header(32)), "is not generation 2 of rank 3"));
  CHECK(contains(failure(in_difference(kLosslessHeaderBytes, std::byte{1})),
                 "is not generation 2 of rank 3: difference: expected"));
  // The rest is what was in the receiver's memory.
  CHECK(contains(failure([](std::vector<std::byte>& message) {
                   if (message.size() < 5000) message.resize(message.size() / 2);
                 }),
                 "is not generation 2 of rank 3"));
}

TEST_CASE("lossless gathers: wrong arguments are refused before a byte moves") {
  const auto communicators = test::make_communicators({0});
  Communicator& communicator = *communicators[0];
  CHECK_THROWS_WITH_AS(
      LosslessPlan(communicator.world(), {{5}, DType::float32}),
      doctest::Contains("expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32"),
      ArgumentError);
  Rank rank(communicator, {5});
  CHECK_THROWS_WITH_AS(
      rank.gather_again(),
      doctest::Contains("secondary: expected shards that an all_gather by differences has filled, got"), ArgumentError);
  rank.kept->memory = rank.kept->memory.first(8);
  CHECK_THROWS_WITH_AS(rank.gather(0), doctest::Contains("secondary: expected 16 bytes, got 8"), ArgumentError);
  rank.kept->memory = {rank.memory.data()->bytes + 1, 16};
  CHECK_THROWS_WITH_AS(rank.gather(0), doctest::Contains("secondary: expected an address that is a multiple of 16"),
                       ArgumentError);
}

}  // namespace zcomm
