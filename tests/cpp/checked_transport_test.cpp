// Tests of checked transports: every planted fault is found, and calls have the same bits as without.
#include "zcomm/checked_transport.hpp"

#include <random>

#include "calls.hpp"
#include "half_weights.hpp"
#include "memory_transport.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"
#include "zcomm/gather.hpp"

namespace zcomm {
namespace {

constexpr std::chrono::seconds kTimeout(60);
const HopFormats kFormats = HopFormats::parse("int8:128/int4:128");

// Flips a bit of one received message, checksums included, after it has arrived.
struct Fault {
  std::size_t message = 0;  // the number of the received message
  std::uint64_t bit = 0;    // modulo its bits
  bool is_planted = false;
};

class FaultyTransport final : public Transport {
 public:
  // Counts messages in `num_received`; both may be null.
  FaultyTransport(std::unique_ptr<Transport> inner, Fault* fault, std::size_t* num_received)
      : inner_(std::move(inner)), fault_(fault), num_received_(num_received) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
             StreamView stream) override {
    inner_->begin(call, peers, timeout, stream);
  }
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                  StreamView stream) override {
    auto transfer = std::make_unique<FaultyTransfer>();
    for (const Recv& recv : recvs) {
      if (recv.num_bytes == 0) continue;
      if (fault_ != nullptr && next_ == fault_->message) transfer->hit = recv;
      ++next_;
    }
    if (num_received_ != nullptr) *num_received_ = next_;
    transfer->fault = fault_;
    transfer->inner = inner_->start(sends, recvs, stream);
    return transfer;
  }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  struct FaultyTransfer final : Transfer {
    void wait(StreamView stream) override {
      inner->wait(stream);
      if (!hit) return;
      constexpr std::size_t kLeast = 200;  // bytes of a lossless message, whose length is not known here
      const std::uint64_t bit = fault->bit % (8 * (hit->is_upper_bound ? kLeast : hit->num_bytes));
      hit->data[bit / 8] ^= std::byte{1} << (bit % 8);
      fault->is_planted = true;
    }
    Fault* fault = nullptr;
    std::optional<Recv> hit;
    std::unique_ptr<Transfer> inner;
  };

  const std::unique_ptr<Transport> inner_;
  Fault* const fault_;
  std::size_t* const num_received_;
  std::size_t next_ = 0;
};

// Gathers weights twice, the second time as lossless differences.
std::vector<float> gather_lossless(Communicator& communicator) {
  const auto view = [](test::Halves& values) {
    return TensorView{reinterpret_cast<std::byte*>(values.data()), std::ssize(values), DType::bfloat16};
  };
  std::vector<test::Halves> slots(static_cast<std::size_t>(communicator.size()), test::Halves(1000));
  std::vector<TensorView> outputs;
  for (test::Halves& slot : slots) outputs.push_back(view(slot));
  const auto plan = std::make_shared<const LosslessPlan>(communicator.world(), shape_of(outputs));
  std::vector<std::max_align_t> memory(plan->secondary_bytes() / sizeof(std::max_align_t) + 1);
  const auto kept = std::make_shared<SecondaryShard>();
  kept->memory = {reinterpret_cast<std::byte*>(memory.data()), plan->secondary_bytes()};
  const GatherPtr operation = make_lossless_gather(plan, kept);
  std::vector<float> result;
  for (int step = 0; step < 2; ++step) {
    test::Halves shard = test::weights_of(communicator.rank(), 1000, step);
    const ConstTensorView own = view(shard);
    communicator.run(*operation, {{&own, 1}, outputs}, kTimeout);
    for (const test::Halves& slot : slots) result.insert(result.end(), slot.begin(), slot.end());
  }
  return result;
}

// Makes one of six calls on a rank of two nodes, and returns its result.
constexpr int kNumCalls = 6;
std::vector<float> call(Communicator& communicator, int which) {
  if (which == 5) return gather_lossless(communicator);
  const int size = communicator.size();
  constexpr std::int64_t kSlot = 1000;
  std::vector<float> in = test::random_tensors(size, kSlot * size, 5)[static_cast<std::size_t>(communicator.rank())];
  std::vector<float> out(in.size());
  const auto slots = split(test::view(in), size, kSlot);
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const auto outputs = split(test::view(out), size, kSlot);
  if (which == 0) test::all_gather(communicator, slots[0], outputs, BlockFormat::parse("int8:128"), kTimeout);
  if (which == 1) test::reduce_scatter(communicator, inputs, outputs[0], kFormats, 0.5f, kTimeout);
  if (which == 2) test::all_to_all(communicator, inputs, outputs, kFormats, kTimeout);
  if (which == 4) {
    out = in;
    test::broadcast(communicator, test::view(out), 1, BlockFormat::parse("int8:128"), kTimeout);
  }
  if (which == 3) {
    out = in;
    test::all_reduce(communicator, test::view(out), kFormats, 1, kTimeout);
  }
  return out;
}

const std::vector<int> kNodes{0, 0, 1, 1};

// Runs a call with checked transports. A rank whose call throws has its text instead of a result.
struct Outcome {
  std::vector<std::vector<float>> results;
  std::vector<std::string> errors;
  std::vector<std::size_t> num_received;
};
Outcome run(int which, int faulty_rank = -1, Fault* fault = nullptr) {
  const std::size_t size = kNodes.size();
  Outcome outcome{std::vector<std::vector<float>>(size), std::vector<std::string>(size),
                  std::vector<std::size_t>(size)};
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_transports(static_cast<int>(size))) {
    const int rank = transport->rank();
    auto faulty = std::make_unique<FaultyTransport>(std::move(transport), rank == faulty_rank ? fault : nullptr,
                                                    &outcome.num_received[static_cast<std::size_t>(rank)]);
    communicators.push_back(std::make_unique<Communicator>(make_checked_transport(std::move(faulty)), Topology(kNodes),
                                                           make_cpu_codec(), make_host_workspace(), 1024));
  }
  test::run_ranks(static_cast<int>(size), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    try {
      outcome.results[r] = call(*communicators[r], which);
    } catch (const TransportError& error) {
      outcome.errors[r] = error.what();
    }
  });
  return outcome;
}

}  // namespace

TEST_CASE("checked transports: calls have the same bits as without") {
  for (int which = 0; which < kNumCalls; ++which) {
    const Outcome checked = run(which);
    auto communicators = test::make_communicators(kNodes, 1024);
    test::run_ranks(static_cast<int>(kNodes.size()), [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      CHECK(checked.errors[r] == "");
      CHECK(checked.results[r] == call(*communicators[r], which));
    });
  }
}

TEST_CASE(
    "checked transports: each planted fault is an error that names the sender, on its rank and on those that wait") {
  std::mt19937_64 random(3);
  for (int which = 0; which < kNumCalls; ++which) {
    const Outcome usual = run(which);
    for (int trial = 0; trial < 60; ++trial) {
      auto faulty = static_cast<std::size_t>(random() % kNodes.size());
      if (usual.num_received[faulty] == 0) faulty = (faulty + 1) % kNodes.size();  // the root of a broadcast
      Fault fault{random() % usual.num_received[faulty], random()};
      const Outcome outcome = run(which, static_cast<int>(faulty), &fault);
      CHECK(fault.is_planted);
      CHECK(outcome.errors[faulty].find("corrupted bytes from rank ") == 0);
      for (std::size_t rank = 0; rank < kNodes.size(); ++rank) {
        const bool is_right = outcome.errors[rank].empty()
                                  ? outcome.results[rank] == usual.results[rank]
                                  : outcome.errors[rank].find("corrupted bytes from rank ") != std::string::npos;
        CHECK(is_right);
      }
    }
  }
}

TEST_CASE("checked transports: a message of unknown length has its own, and several messages keep their order") {
  for (const bool is_faulty : {false, true}) {
    Fault fault{1, 900};
    auto inner = make_local_transports(2);
    test::run_ranks(2, [&](int rank) {
      std::vector<std::byte> first(100, std::byte{1}), second(200, std::byte{2});
      std::vector<std::byte> a(100), b(300);
      const auto transport = make_checked_transport(std::make_unique<FaultyTransport>(
          std::move(inner[static_cast<std::size_t>(rank)]), is_faulty && rank == 1 ? &fault : nullptr, nullptr));
      if (rank == 0) {
        const Send sends[] = {{1, first.data(), 100}, {1, nullptr, 0}, {1, second.data(), 200, true}};
        transport->start(sends, {}, {})->wait({});
        return;
      }
      const Recv recvs[] = {{0, a.data(), 100}, {0, nullptr, 0}, {0, b.data(), 300, true}};
      const auto transfer = transport->start({}, recvs, {});
      if (is_faulty) {
        CHECK_THROWS_WITH_AS(transfer->wait({}),
                             "corrupted bytes from rank 0: message 2 of transfer 0, of 300 bytes, has another checksum "
                             "than when it was sent",
                             CorruptedWireError);
      } else {
        transfer->wait({});
        CHECK(a == first);
        CHECK(std::vector(b.begin(), b.begin() + 200) == second);
      }
    });
    CHECK(fault.is_planted == is_faulty);
  }
}

// Two ranks that send through shared memory. The second of two messages may stay there.
struct SharedMemory {
  explicit SharedMemory(bool is_checked) {
    for (int rank = 0; rank < 2; ++rank) {
      transports.push_back(std::make_unique<test::MemoryTransport>(memory, rank));
      if (is_checked) transports.back() = make_checked_transport(std::move(transports.back()));
    }
    for (auto& message : sent) {
      for (std::byte& byte : message) byte = static_cast<std::byte>(random());
    }
  }

  enum class Outcome { right, wrong, error };
  // Moves two messages. Before the receiver looks, flips a random bit of one of the first `num_messages` in the memory,
  // if any. The third one has the checksums.
  Outcome move(std::size_t num_messages) {
    for (const auto& transport : transports) transport->begin("call", {}, kTimeout);
    const Send sends[] = {{1, sent[0].data(), sent[0].size()}, {1, sent[1].data(), sent[1].size()}};
    const auto sending = transports[0]->start(sends, {}, {});
    if (num_messages > 0) plant(random() % num_messages);
    std::vector<std::byte> first(sent[0].size()), second(sent[1].size());
    const std::byte* place = second.data();
    const Recv recvs[] = {{0, first.data(), first.size()}, {0, second.data(), second.size(), false, &place}};
    const auto receiving = transports[1]->start({}, recvs, {});
    sending->wait({});
    try {
      receiving->wait({});
    } catch (const CorruptedWireError& error) {
      CHECK(std::string(error.what()).find("corrupted bytes from rank 0: message ") == 0);
      return Outcome::error;
    }
    CHECK(place != second.data());
    const bool is_right = first == sent[0] && std::equal(sent[1].begin(), sent[1].end(), place);
    return is_right ? Outcome::right : Outcome::wrong;
  }
  void plant(std::size_t number) {
    constexpr std::size_t kArenaBytes = std::size_t{4} << 20, kAlignment = 64;
    std::byte* place = memory->outboxes[0][0].bytes + MemoryChannels::outbox_bytes(2) - kArenaBytes;
    for (std::size_t i = 0; i < number; ++i) place += (sent[i].size() + kAlignment - 1) / kAlignment * kAlignment;
    const std::size_t num_bytes = number < 2 ? sent[number].size() : kSumBytes;
    if (number < 2) REQUIRE(std::equal(place, place + num_bytes, sent[number].begin()));
    place[random() % num_bytes] ^= std::byte{1} << (random() % 8);
  }

  static constexpr std::size_t kSumBytes = 32;  // of two messages, in the third one
  std::mt19937_64 random{5};
  std::shared_ptr<const test::Memory> memory = std::make_shared<const test::Memory>(2);
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::byte> sent[2] = {std::vector<std::byte>(777), std::vector<std::byte>(1000)};
};

TEST_CASE("checked transports: 20,000 random faults in memory that ranks share are found, and silent without checks") {
  constexpr int kNumFaults = 20000;
  SharedMemory checked(true), usual(false);
  int num_found = 0, num_silent = 0;
  for (int fault = 0; fault < kNumFaults; ++fault) {
    num_found += checked.move(3) == SharedMemory::Outcome::error ? 1 : 0;
    num_silent += usual.move(2) == SharedMemory::Outcome::wrong ? 1 : 0;
  }
  CHECK(num_found == kNumFaults);
  CHECK(num_silent == kNumFaults);
  CHECK(checked.move(0) == SharedMemory::Outcome::right);
  CHECK(usual.move(0) == SharedMemory::Outcome::right);
}

TEST_CASE("checked transports: one of n calls has checksums, each time another one") {
  // Calls 0 and 4 have two messages: 0 and 1, and 5 and 6.
  for (const auto& [message, is_found] : {std::pair<std::size_t, bool>{2, false}, {4, false}, {5, true}, {6, true}}) {
    CAPTURE(message);
    Fault fault{message, 9};
    std::vector<std::size_t> counts;
    std::size_t num_received = 0;
    int num_wrong = 0;
    bool has_error = false;
    auto inner = make_local_transports(2);
    test::run_ranks(2, [&](int rank) {
      const int peer = 1 - rank;
      const auto transport = make_checked_transport(
          std::make_unique<FaultyTransport>(std::move(inner[static_cast<std::size_t>(rank)]),
                                            rank == 1 ? &fault : nullptr, rank == 1 ? &num_received : nullptr),
          3);
      for (int call = 0; call < 5; ++call) {
        const std::vector<std::byte> sent(100, std::byte{7});
        std::vector<std::byte> received(100);
        transport->begin("call", {&peer, 1}, kTimeout);
        const Send send{1, sent.data(), 100};
        const Recv recv{0, received.data(), 100};
        try {
          if (rank == 0) transport->start({&send, 1}, {}, {})->wait({});
          if (rank == 1) transport->start({}, {&recv, 1}, {})->wait({});
        } catch (const CorruptedWireError&) {
          has_error = true;
        }
        if (rank == 1) counts.push_back(num_received);
        if (rank == 1 && !has_error) num_wrong += received == sent ? 0 : 1;
      }
    });
    CHECK(fault.is_planted);
    CHECK(counts == std::vector<std::size_t>{2, 3, 4, 5, 7});
    CHECK(has_error == is_found);
    CHECK(num_wrong == (is_found ? 0 : 1));
  }
  CHECK_THROWS_WITH_AS(make_checked_transport(std::move(make_local_transports(1)[0]), 0),
                       "every: expected at least 1, got 0", ArgumentError);
}

TEST_CASE("checked transports: calls of two ranks do not change what the others check") {
  auto inner = make_local_transports(3);
  test::run_ranks(3, [&](int rank) {
    const auto transport = make_checked_transport(std::move(inner[static_cast<std::size_t>(rank)]), 2);
    for (int call = 0; call < 8; ++call) {
      std::vector<int> peers;
      for (int peer = 0; peer < 3; ++peer) {
        const bool is_of_all = call % 2 != 0;
        if (peer != rank && (is_of_all || peer + rank == 1)) peers.push_back(peer);
      }
      if (peers.empty()) continue;
      const std::vector<std::byte> sent(100, static_cast<std::byte>(rank));
      std::vector<std::vector<std::byte>> received(3, std::vector<std::byte>(100));
      std::vector<Send> sends;
      std::vector<Recv> recvs;
      for (const int peer : peers) {
        sends.push_back({peer, sent.data(), 100});
        recvs.push_back({peer, received[static_cast<std::size_t>(peer)].data(), 100});
      }
      transport->begin("call", peers, kTimeout);
      transport->start(sends, recvs, {})->wait({});
      for (const int peer : peers) {
        CHECK(received[static_cast<std::size_t>(peer)] == std::vector<std::byte>(100, static_cast<std::byte>(peer)));
      }
    }
  });
}

}  // namespace zcomm
