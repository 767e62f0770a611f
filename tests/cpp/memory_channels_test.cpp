// Collectives through memory that the ranks of a node share, here threads, compared with other transports; and what
// ends a wait.
#include "transport/memory_channels.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "calls.hpp"
#include "memory_transport.hpp"
#include "ranks.hpp"
#include "values.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::Memory;
using test::MemoryTransport;
using test::Values;

using Batch = MemoryChannels::Batch;

std::vector<std::unique_ptr<Communicator>> communicators_in_memory(const std::vector<int>& ids,
                                                                   std::size_t chunk_bytes) {
  const auto memory = std::make_shared<const Memory>(static_cast<int>(ids.size()));
  std::vector<std::unique_ptr<Communicator>> all;
  for (int rank = 0; rank < static_cast<int>(ids.size()); ++rank) {
    all.push_back(std::make_unique<Communicator>(std::make_unique<MemoryTransport>(memory, rank), Topology(ids),
                                                 make_cpu_codec(), make_host_workspace(), chunk_bytes));
  }
  return all;
}

struct Step {
  int action;
  std::int64_t elements;       // of each rank's shard
  std::vector<Values> values;  // of each rank, for all shards
};

// Returns the values that a rank has after each step.
std::vector<Values> run_steps(Communicator& communicator, const std::vector<Step>& steps) {
  const int size = communicator.size();
  std::vector<Values> results;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto& [action, n, values] = steps[i];
    Values whole = values[static_cast<std::size_t>(communicator.rank())];
    Values part(static_cast<std::size_t>(n));
    const auto slots = split(test::view(whole), size, n);
    const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
    const auto formats = HopFormats::parse(action % 2 == 0 ? "int8:32/int4:32" : "exact");
    if (action < 2) {
      test::all_gather(communicator, slots[static_cast<std::size_t>(communicator.rank())], slots, formats.intra_node,
                       60s);
    } else if (action < 4) {
      test::reduce_scatter(communicator, inputs, test::view(part), formats, 0.5f, 60s);
    } else if (action < 6) {
      test::all_reduce(communicator, test::view(whole), formats, 0.5f, 60s);
    } else {
      test::broadcast(communicator, test::view(whole), static_cast<int>(i) % size, formats.intra_node, 60s);
    }
    results.push_back(std::move(whole));
    results.push_back(std::move(part));
  }
  return results;
}

int number_from_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

TEST_CASE("memory channels: random schedules have the bits of another transport") {
  const int first = number_from_environment("ZCOMM_FIRST_SCHEDULE", 0);
  const int count = number_from_environment("ZCOMM_RANDOM_SCHEDULES", 40);
  for (int number = first; number < first + count; ++number) {
    CAPTURE(number);
    std::mt19937 random(static_cast<unsigned>(number));
    const std::vector<std::vector<int>> shapes{{2}, {3}, {4}, {2, 2}, {3, 1}, {1, 1}, {2, 2, 2}, {5}};
    const std::vector<int> ids = test::node_ids(shapes[random() % shapes.size()], random() % 2 == 0);
    const int size = static_cast<int>(ids.size());
    std::vector<Step> steps(1 + random() % 6);
    for (Step& step : steps) {
      const std::int64_t longest = random() % 32 == 0 ? 300'000 : 3000;
      step = {static_cast<int>(random() % 8), static_cast<std::int64_t>(random()) % longest, {}};
      step.values = test::random_tensors(size, step.elements * size, static_cast<unsigned>(number));
    }
    const std::size_t chunk_bytes = random() % 2 == 0 ? 4096 : kDefaultChunkBytes;
    const auto in_memory = communicators_in_memory(ids, chunk_bytes);
    const auto others = test::make_communicators(ids, chunk_bytes);
    test::run_ranks(size, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      if (run_steps(*in_memory[r], steps) != run_steps(*others[r], steps))
        throw Error("schedule " + std::to_string(number) + ": other bits");
    });
  }
}

TEST_CASE("memory channels: messages beyond the arena are moved in pieces, to several receivers at once") {
  const int size = 3;
  const Memory memory(size);
  const std::size_t num_bytes = (std::size_t{9} << 20) + 13;
  std::vector<std::byte> sent(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) sent[i] = static_cast<std::byte>(i * 7 % 251);
  test::run_ranks(size, [&](int rank) {
    const auto channels = memory.channels(rank);
    Batch batch = 0;
    std::vector<std::byte> received(num_bytes + 100);
    const int peers[] = {1, 2};
    const std::uint32_t tags[] = {11, 12};
    if (rank == 0) {
      channels->send(peers, sent.data(), num_bytes, tags, batch);
    } else {
      channels->recv(0, received.data(), received.size(), true, rank == 1 ? 11 : 12, batch);
    }
    if (!channels->wait(batch, 60s)) throw Error("not done");
    received.resize(num_bytes);
    if (rank != 0 && received != sent) throw Error("other bytes");
  });
}

TEST_CASE("memory channels: a message may stay where its sender put it, until that wants room") {
  const Memory memory(3);
  const auto sender = memory.channels(0), reader = memory.channels(1), other = memory.channels(2);
  const int one = 1, two = 2;
  const std::uint32_t tag = 0;
  std::vector<std::byte> bytes(std::size_t{512} << 10, std::byte{7});
  std::vector<std::byte> room(bytes.size());
  Batch read = 0, sent = 0, waited = 0;
  const std::byte* place = room.data();
  sender->send({&one, 1}, bytes.data(), bytes.size(), {&tag, 1}, sent);
  reader->recv(0, room.data(), room.size(), false, tag, read, &place);
  CHECK(sender->progress());
  CHECK(reader->wait(read, 1s));
  CHECK(place != room.data());
  CHECK(std::equal(bytes.begin(), bytes.end(), place));
  CHECK(room[0] == std::byte{0});

  // The arena has room for seven more, and none is taken.
  for (int i = 0; i < 8; ++i) sender->send({&two, 1}, bytes.data(), bytes.size(), {&tag, 1}, sent);
  CHECK(sender->progress());
  CHECK_FALSE(sender->wait(sent, 20ms));
  CHECK(sender->peers_of(sent) == std::vector<int>{1, 2, 2, 2, 2, 2, 2, 2, 2});
  reader->recv(2, room.data(), 1, false, tag, waited);
  CHECK_FALSE(reader->wait(waited, 20ms));  // waits for another rank meanwhile
  CHECK(place == room.data());
  CHECK(room == bytes);
  CHECK(sender->wait(sent, 1s));
}

TEST_CASE("memory channels: what a dropped batch has left in an outbox is free") {
  const Memory memory(2);
  const auto sender = memory.channels(0), reader = memory.channels(1);
  const int one = 1;
  const std::uint32_t tag = 0;
  const std::vector<std::byte> bytes(std::size_t{1} << 20);
  std::vector<std::byte> room(bytes.size());
  for (int i = 0; i < 20; ++i) {
    Batch batch = 0;
    std::vector<const std::byte*> places(4, room.data());
    for (int k = 0; k < 4; ++k) {
      sender->send({&one, 1}, bytes.data(), 300'000, {&tag, 1}, batch);
      reader->recv(0, room.data(), 300'000, false, tag, batch, &places[static_cast<std::size_t>(k)]);
    }
    CHECK(sender->progress());
    CHECK(reader->wait(batch, 1s));
    CHECK(std::set<const std::byte*>(places.begin(), places.end()).size() == 4);
    CHECK(std::ranges::count(places, room.data()) == 0);
    reader->drop(batch);
  }
}

TEST_CASE("memory channels: a message that does not fit is an error, one with another tag waits") {
  const Memory memory(2);
  const auto sender = memory.channels(0), receiver = memory.channels(1);
  Batch batch = 0;
  const std::vector<std::byte> bytes(100);
  std::vector<std::byte> room(100);
  const int peer = 1;
  const std::uint32_t tag = 5;
  sender->send({&peer, 1}, bytes.data(), 100, {&tag, 1}, batch);
  CHECK(sender->progress());
  CHECK(batch == 0);  // its sender need not wait for the receiver

  Batch other = 0;
  receiver->recv(0, room.data(), 100, false, 6, other);
  CHECK_FALSE(receiver->wait(other, 20ms));
  CHECK(receiver->peers_of(other) == std::vector<int>{0});
  CHECK(receiver->differs(0));
  receiver->drop(other);
  CHECK_FALSE(receiver->wait(other, 20ms));  // and nothing later takes its place

  const auto next = memory.channels(1);
  Batch small = 0;
  next->recv(0, room.data(), 99, true, 5, small);
  CHECK_THROWS_WITH_AS(next->progress(), "a message of 100 bytes came where this rank expects at most 99",
                       TransportError);
}

TEST_CASE("memory channels: fields that no sender writes are an error, and are never used") {
  struct PostedPiece {  // as a sender puts it into its outbox
    std::uint64_t number, offset, left;
    std::uint32_t num_bytes, tag;
  };
  constexpr std::size_t kHeaderBytes = 512, kArenaBytes = std::size_t{4} << 20;
  const std::pair<const char*, void (*)(PostedPiece&)> changes[] = {
      {"longer than the message", [](PostedPiece& piece) { piece.num_bytes = 101; }},
      {"shorter than its part", [](PostedPiece& piece) { piece.num_bytes = 0; }},
      {"beyond the arena", [](PostedPiece& piece) { piece.offset = kArenaBytes - 99; }},
      {"far beyond the arena", [](PostedPiece& piece) { piece.offset = ~std::uint64_t{0} - 50; }},
  };
  for (const auto& [name, change] : changes) {
    for (const bool may_stay : {false, true}) {
      CAPTURE(name);
      CAPTURE(may_stay);
      const Memory memory(2);
      const auto sender = memory.channels(0), receiver = memory.channels(1);
      const int peer = 1;
      const std::uint32_t tag = 5;
      const std::vector<std::byte> bytes(100);
      std::vector<std::byte> room(100);
      const std::byte* place = room.data();
      Batch sent = 0, batch = 0;
      sender->send({&peer, 1}, bytes.data(), 100, {&tag, 1}, sent);
      CHECK(sender->progress());
      constexpr std::size_t kPieces = 64;  // for receiver 0, which come first
      auto& piece =
          *reinterpret_cast<PostedPiece*>(memory.outboxes[0][0].bytes + kHeaderBytes + kPieces * sizeof(PostedPiece));
      REQUIRE(piece.left == 100);
      change(piece);
      receiver->recv(0, room.data(), 100, false, tag, batch, may_stay ? &place : nullptr);
      CHECK_THROWS_WITH_AS(receiver->progress(), doctest::Contains("piece: expected 100 bytes within the outbox of"),
                           TransportError);
    }
  }
}

TEST_CASE("memory channels: a reason without an end ends with its room") {
  const Memory memory(2);
  memory.channels(0)->fail("reason");
  constexpr std::size_t kReason = 20, kReasonChars = 492;
  std::memset(memory.outboxes[0][0].bytes + kReason, 'x', kReasonChars + 8);  // and into what follows
  CHECK(memory.channels(1)->reason_of(0) == std::string(kReasonChars, 'x'));
}

TEST_CASE("memory channels: a failure wakes the peers and tells them why") {
  const Memory memory(2);
  const auto failing = memory.channels(0), waiting = memory.channels(1);
  Batch batch = 0;
  std::byte room{};
  waiting->recv(0, &room, 1, false, 1, batch);
  std::thread thread([&] {
    std::this_thread::sleep_for(50ms);
    failing->fail("out of luck");
    failing->fail("only the first reason counts");
  });
  CHECK_FALSE(waiting->wait(batch, 60s));
  thread.join();
  CHECK(waiting->reason_of(waiting->find_failed(batch)) == "out of luck");
  CHECK(waiting->find_failed() == 0);
  CHECK(failing->find_failed() == -1);
}

TEST_CASE(
    "memory channels: a batch needs who sends to it and, while it is queued, who has not taken what is before it") {
  const Memory memory(4);
  const auto channels = memory.channels(0);
  Batch full = 0, batch = 0;
  const std::vector<std::byte> bytes(std::size_t{4} << 20);
  std::byte room{};
  const int one = 1, two = 2;
  const std::uint32_t tag = 0;
  channels->send({&one, 1}, bytes.data(), bytes.size(), {&tag, 1}, full);
  channels->send({&two, 1}, bytes.data(), 1, {&tag, 1}, batch);
  channels->recv(3, &room, 1, false, tag, batch);
  CHECK(channels->progress());
  CHECK(full == 0);
  CHECK(channels->peers_of(full).empty());
  const std::vector<int> peers = channels->peers_of(batch);
  CHECK(peers.front() == 3);
  CHECK(std::set<int>(peers.begin(), peers.end()) == std::set<int>{1, 2, 3});
  memory.channels(1)->fail("not needed by who receives alone");
  Batch receiving = 0;
  channels->recv(3, &room, 1, false, tag, receiving);
  CHECK(channels->find_failed(batch) == 1);
  CHECK(channels->find_failed(receiving) == -1);
}

}  // namespace zcomm
