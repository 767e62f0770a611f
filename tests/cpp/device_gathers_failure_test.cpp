// Tests of failing gathers by lossless differences on GPUs, over tests/cuda_host: every rank reports the failure, and
// no wrong value is left.
#include <doctest/doctest.h>

#include <array>
#include <mutex>
#include <string>

#include "device_modules.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

// Exchange of failures between ranks without a store.
struct Gossip {
  void connect(NcclOptions& options) {
    options.on_failure = [this](const std::string& reason) {
      const std::lock_guard lock(mutex);
      if (text.empty()) text = reason;
    };
    options.peer_failure = [this] {
      const std::lock_guard lock(mutex);
      return text;
    };
  }
  std::mutex mutex;
  std::string text;
};

// Outcome of a rank of 2 x 2: its error in the body or in later calls, and the slots' contents afterwards.
enum class Values { unknown, right, nan, aborted, wrong };
struct Outcome {
  std::string error;
  std::array<Values, 4> slots{};  // unknown where the body threw
};
constexpr std::size_t kLength = 5000;

// Classifies a slot. `nan`: some values are NaN, the others are right or left by an abort.
Values look(const Halves& values, const Halves& expected, std::size_t slot) {
  constexpr std::uint16_t kAborted = 0xa5a5;
  Values found = Values::right;
  for (std::size_t i = slot * kLength; i < (slot + 1) * kLength; ++i) {
    if (values[i] == expected[i]) continue;
    const bool is_nan = (values[i] & 0x7fff) > 0x7f80;
    if (!is_nan && values[i] != kAborted) return Values::wrong;
    if (is_nan || found == Values::right) found = is_nan ? Values::nan : Values::aborted;
  }
  return found;
}

// Calls body(module, stream).
template <class Body>
std::vector<Outcome> outcomes_of(int step, Body&& body, std::chrono::milliseconds timeout = kTimeout) {
  std::vector<Outcome> outcomes(4);
  Gossip gossip;
  test::run_nccl_ranks(4, [&](int rank, NcclOptions options) {
    gossip.connect(options);
    const auto communicator = test::make_cuda_communicator(kTwoNodes, kDefaultChunkBytes, options);
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    Stream stream;
    Module module(*communicator, even(kTwoNodes, kLength));
    module.timeout = timeout;
    try {
      body(module, stream);
      const Halves values = module.output->get(stream);
      for (std::size_t slot = 0; slot < 4; ++slot) outcome.slots[slot] = look(values, module.expected(step), slot);
      for (const auto latest = std::chrono::steady_clock::now() + kTimeout;
           std::chrono::steady_clock::now() < latest;) {
        prepare(*communicator, {&module}, stream.view());
      }
    } catch (const TransportError& error) {
      outcome.error = error.what();
    }
    synchronize(stream.view());
  });
  return outcomes;
}

void flip_bit(const Stream& stream, std::byte* byte) {
  test::require_cuda(cuda_host::enqueue(stream, [byte] { *byte ^= std::byte{1}; }));
}

// Rank 1 finds the write. Its call throws where the failure is known before the call returns.
bool found(Values slot) { return slot == Values::nan || slot == Values::unknown; }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("device gathers: a stray write is an error on every receiver, and no wrong value is left") {
  const NoTraces no_traces;
  // Rank 1 holds slot 3 for its node, and rank 0 gets it from there.
  for (const bool at_owner : {false, true}) {
    const auto outcomes = outcomes_of(2, [&](Module& module, const Stream& stream) {
      for (int step = 0; step < 3; ++step) {
        module.set(step, stream);
        if (step == 2 && module.communicator.rank() == (at_owner ? 3 : 1)) {
          flip_bit(stream, module.memory->data() + module.plan->secondary_offset(3) + 4000);
        }
        module.gather(stream.view());
      }
    });
    for (std::size_t rank = 0; rank < 4; ++rank) {
      INFO(outcomes[rank].error);
      CHECK(contains(outcomes[rank].error,
                     "differences of slot 3: what this rank has made of generation 2 is not "
                     "generation 3 of rank 3"));
      for (std::size_t slot = 0; slot < 4; ++slot) {
        CHECK(outcomes[rank].slots[slot] != Values::wrong);
        if (rank >= 2 || slot != 3) CHECK(outcomes[rank].slots[slot] != Values::nan);
      }
    }
    CHECK(found(outcomes[1].slots[3]));
    CHECK(outcomes[0].slots[3] != Values::right);
  }
}

TEST_CASE("device gathers: a write to what was gathered is found when it is gathered again") {
  const NoTraces no_traces;
  const auto outcomes = outcomes_of(0, [](Module& module, const Stream& stream) {
    module.set(0, stream);
    module.gather(stream.view());
    if (module.communicator.rank() == 1) flip_bit(stream, module.memory->data());
    module.set(0, stream);
    module.gather_again(stream.view());
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    INFO(outcomes[rank].error);
    CHECK(contains(outcomes[rank].error, "differences of slot 1: generation 1 was written to on rank 1"));
    for (const Values slot : outcomes[rank].slots) CHECK(slot != Values::wrong);
  }
  CHECK(found(outcomes[1].slots[1]));
  CHECK(outcomes[0].slots[1] != Values::right);
}

TEST_CASE("device gathers: ranks at other generations say so") {
  const NoTraces no_traces;
  const auto outcomes = outcomes_of(2, [&](Module& module, const Stream& stream) {
    for (int step = 0; step < 3; ++step) {
      module.set(step, stream);
      if (step == 2 && module.communicator.rank() == 3) module.kept->generation = 0;
      module.gather(stream.view());
    }
  });
  for (const Outcome& outcome : outcomes) {
    INFO(outcome.error);
    CHECK(contains(outcome.error, "differences of slot"));
    CHECK(contains(outcome.error, "generation 0"));
    CHECK(contains(outcome.error, "generation 2"));
  }
}

TEST_CASE("device gathers: a gather that a rank skips, or makes again instead, is an error on all") {
  const NoTraces no_traces;
  for (const bool again : {false, true}) {
    const auto outcomes = outcomes_of(
        1,
        [&](Module& module, const Stream& stream) {
          for (int step = 0; step < 2; ++step) {
            module.set(step, stream);
            const bool is_odd = step == 1 && module.communicator.rank() == 3;
            if (!is_odd) module.gather(stream.view());
            if (is_odd && again) module.gather_again(stream.view());
          }
        },
        2s);
    for (const Outcome& outcome : outcomes) CHECK_FALSE(outcome.error.empty());
  }
}

}  // namespace zcomm
