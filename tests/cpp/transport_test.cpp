#include "zcomm/transport.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <numeric>

#include "ranks.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;

std::vector<int> peers_of(const Transport& transport) {
  std::vector<int> peers;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) peers.push_back(peer);
  }
  return peers;
}

}  // namespace

TEST_CASE("all_gather fills every slot") {
  for (const int size : {1, 2, 5}) {
    auto transports = test::make_transports(size);
    test::run_ranks(size, [&](int rank) {
      Transport& transport = *transports[static_cast<std::size_t>(rank)];
      std::vector<std::byte> slots(static_cast<std::size_t>(size) * 3);
      for (std::size_t i = 0; i < 3; ++i) slots[static_cast<std::size_t>(rank) * 3 + i] = std::byte(rank * 3 + 1);
      transport.begin("gather", peers_of(transport), 10s);
      transport.all_gather(slots.data(), 3, {})->wait({});
      for (std::size_t i = 0; i < slots.size(); ++i) CHECK(slots[i] == std::byte(i / 3 * 3 + 1));
    });
  }
}

TEST_CASE("messages between two ranks match in order, empty ones are skipped, several transfers are under way") {
  auto transports = test::make_transports(2);
  test::run_ranks(2, [&](int rank) {
    Transport& transport = *transports[static_cast<std::size_t>(rank)];
    const int peer = 1 - rank;
    transport.begin("exchange", peers_of(transport), 10s);
    std::array<std::array<std::byte, 4>, 8> out{};
    std::array<std::array<std::byte, 4>, 8> in{};
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i].fill(std::byte(i * 10 + static_cast<std::size_t>(rank)));
      const std::array<Send, 2> sends{Send{peer, nullptr, 0}, Send{peer, out[i].data(), 4}};
      const std::array<Recv, 2> recvs{Recv{peer, in[i].data(), 4}, Recv{peer, nullptr, 0}};
      transfers.push_back(transport.start(sends, recvs, {}));
    }
    for (auto& transfer : transfers) transfer->wait({});
    for (std::size_t i = 0; i < in.size(); ++i) CHECK(in[i][3] == std::byte(i * 10 + static_cast<std::size_t>(peer)));
  });
}

TEST_CASE("promise 8: ranks that call different things learn what the other called") {
  auto transports = test::make_transports(3);
  std::atomic<int> failures = 0;
  test::run_ranks(3, [&](int rank) {
    Transport& transport = *transports[static_cast<std::size_t>(rank)];
    try {
      transport.begin(rank == 1 ? "reduce" : "gather", peers_of(transport), 10s);
      std::array<std::byte, 3> slots{};
      transport.all_gather(slots.data(), 1, {})->wait({});
    } catch (const TransportError& error) {
      ++failures;
      const std::string text = error.what();
      CHECK(text.find("\"reduce\"") != std::string::npos);
      CHECK(text.find("\"gather\"") != std::string::npos);
    }
  });
  CHECK(failures == 3);
}

TEST_CASE("promise 9: a peer that never comes is a timeout, an abort reaches every rank with its reason") {
  auto transports = test::make_transports(2);
  CHECK_THROWS_AS(transports[0]->begin("alone", std::vector<int>{1}, 20ms), TimeoutError);

  auto others = test::make_transports(3);
  std::atomic<int> failures = 0;
  test::run_ranks(3, [&](int rank) {
    Transport& transport = *others[static_cast<std::size_t>(rank)];
    if (rank == 2) {
      transport.abort("for a test");
      return;
    }
    try {
      transport.begin("with an aborted rank", peers_of(transport), 10s);
    } catch (const TransportError& error) {
      ++failures;
      CHECK(std::string(error.what()).find("rank 2 aborted for a test") != std::string::npos);
    }
  });
  CHECK(failures == 2);
}

TEST_CASE("two sides that disagree on a size fail instead of copying") {
  auto transports = test::make_transports(2);
  std::array<std::byte, 8> from{};
  std::array<std::byte, 8> to{};
  const Send send{1, from.data(), 8};
  const Recv recv{0, to.data(), 4};
  auto sent = transports[0]->start({&send, 1}, {}, {});
  CHECK_THROWS_WITH_AS(transports[1]->start({}, {&recv, 1}, {})->wait({}),
                       doctest::Contains("moves 4 bytes where rank 0 moves 8"), TransportError);
}

TEST_CASE("a timeout that the clock cannot count is never over") {
  CHECK(deadline_after(std::chrono::milliseconds::max()) == std::chrono::steady_clock::time_point::max());
  CHECK(deadline_after(1h) - std::chrono::steady_clock::now() > 59min);
  auto transports = test::make_transports(2);
  test::run_ranks(2, [&](int rank) {
    transports[static_cast<std::size_t>(rank)]->begin("a call", std::vector<int>{1 - rank},
                                                      std::chrono::milliseconds::max());
  });
}

// Ranks over NCCL are connected with the peers that an operation names.
TEST_CASE("threads refuse a message to a rank that the call has not named") {
  auto transports = test::make_transports(3);
  test::run_ranks(3, [&](int rank) {
    if (rank == 2) return;
    Transport& transport = *transports[static_cast<std::size_t>(rank)];
    transport.begin("a call of two", std::vector<int>{1 - rank}, 10s);
    const std::array<std::byte, 8> bytes{};
    const Send send{2, bytes.data(), 8};
    CHECK_THROWS_WITH_AS(transport.start({&send, 1}, {}, {}), "peer: expected one that the call has named, got rank 2",
                         TransportError);
  });
}

TEST_CASE("a receive of a limit takes what is sent up to it, whichever side comes first") {
  for (const bool sends_first : {true, false}) {
    auto transports = test::make_transports(2);
    const std::array<std::byte, 3> from{std::byte{1}, std::byte{2}, std::byte{3}};
    std::array<std::byte, 8> to{};
    const Send send{1, from.data(), from.size()};
    const Recv recv{0, to.data(), to.size() - 1, /*is_upper_bound=*/true};
    std::unique_ptr<Transfer> sent;
    std::unique_ptr<Transfer> received;
    if (!sends_first) received = transports[1]->start({}, {&recv, 1}, {});
    sent = transports[0]->start({&send, 1}, {}, {});
    if (sends_first) received = transports[1]->start({}, {&recv, 1}, {});
    sent->wait({});
    received->wait({});
    CHECK(to == std::array<std::byte, 8>{std::byte{1}, std::byte{2}, std::byte{3}});

    const Recv too_small{0, to.data(), 2, /*is_upper_bound=*/true};
    sent = transports[0]->start({&send, 1}, {}, {});
    CHECK_THROWS_WITH_AS(transports[1]->start({}, {&too_small, 1}, {}),
                         doctest::Contains("moves 2 bytes where rank 0 moves 3"), TransportError);
  }
}

TEST_CASE("a transfer that is given up moves no byte afterwards, and its peer fails") {
  for (const bool sender_gives_up : {true, false}) {
    auto transports = test::make_transports(2);
    std::array<std::byte, 4> from{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
    std::array<std::byte, 4> to{};
    const Send send{1, from.data(), from.size()};
    const Recv recv{0, to.data(), to.size()};
    test::run_ranks(2, [&](int rank) {
      transports[static_cast<std::size_t>(rank)]->begin("given up", std::vector<int>{1 - rank}, 10s);
    });
    if (sender_gives_up) {
      transports[0]->start({&send, 1}, {}, {});
      CHECK_THROWS_AS(transports[1]->start({}, {&recv, 1}, {})->wait({}), TransportError);
    } else {
      transports[1]->start({}, {&recv, 1}, {});
      CHECK_THROWS_AS(transports[0]->start({&send, 1}, {}, {})->wait({}), TransportError);
    }
    CHECK(to == std::array<std::byte, 4>{});
  }
}

}  // namespace zcomm
