// Tests of failing transfers over NCCL: every rank fails in time, with a reason, and leaves nothing behind.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda_helpers.hpp"
#include "reasons.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::contains;
using test::DeviceArray;
using test::NoTraces;
using test::Reasons;
using test::run_nccl_ranks;
using test::Stream;

// One rank of two, with a transfer that waits for the other.
struct Waiting {
  explicit Waiting(const NcclOptions& options, std::chrono::milliseconds timeout = 60s, bool is_held = false)
      : transport(make_nccl_transport(options)), bytes(64) {
    if (is_held) nccl_host_hold_rank(options.rank, 1);
    bytes.set(std::vector<unsigned char>(64), stream);
    transport->begin("all_gather of a test", std::vector<int>{1 - options.rank}, timeout);
    transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
  }
  // Expects the stream to go on although the other rank never called.
  std::string failure() {
    synchronize(stream.view());
    try {
      transport->begin("next", {}, 1s);
    } catch (const TransportError& error) {
      return error.what();
    }
    return "none";
  }

  std::unique_ptr<Transport> transport;
  Stream stream;
  DeviceArray<unsigned char> bytes;
};

// Runs body(options) as rank 0 of two. Rank 1 connects, and calls nothing until the body is over.
template <class Body>
void run_beside_silent_rank(Body&& body) {
  std::latch both_done(2);
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    if (rank == 0) {
      body(options);
      both_done.arrive_and_wait();
    } else {
      const auto transport = make_nccl_transport(options);
      both_done.arrive_and_wait();
    }
  });
}

}  // namespace

TEST_CASE("nccl: a rank that does not come is a timeout that names the call; streams go on, later calls throw") {
  const NoTraces no_traces;
  run_beside_silent_rank([&](NcclOptions options) {
    Reasons reasons;
    Reasons undefined;
    options.on_failure = reasons.recorder();
    options.on_undefined_bytes = undefined.recorder();
    Waiting waiting(options, 2s);
    const std::string reason = reasons.only();
    CHECK(contains(reason, "in all_gather of a test: not done within the timeout, 2000 ms"));
    CHECK(waiting.failure() == "this transport failed before: " + reason);
    CHECK_THROWS_AS(waiting.transport->all_gather(waiting.bytes.bytes(), 32, waiting.stream.view()), TimeoutError);
    CHECK(contains(reasons.only(), "2000 ms"));  // told once
    CHECK(undefined.only() == reason);
  });
}

TEST_CASE("nccl: a process may end before streams go on with undefined bytes, however long peers are told") {
  const NoTraces no_traces;
  run_beside_silent_rank([](NcclOptions options) {
    std::atomic<cudaStream_t> stream = nullptr;
    std::atomic<int> state = -1;
    options.on_failure = [](const std::string&) { std::this_thread::sleep_for(500ms); };
    options.on_undefined_bytes = [&](const std::string&) { state = cudaStreamQuery(stream); };
    Waiting waiting(options, 2s);
    stream = waiting.stream;
    CHECK(contains(waiting.failure(), "not done within the timeout"));
    CHECK(state == cudaErrorNotReady);
  });
}

TEST_CASE("nccl: what a peer says ends a start that NCCL keeps") {
  const NoTraces no_traces;
  std::latch both_connected(2);
  run_nccl_ranks(2, [&](int, NcclOptions options) {
    const auto has_failed = std::make_shared<std::atomic<bool>>(false);
    options.peer_failure = [has_failed] { return *has_failed ? "a peer gave up" : ""; };
    const auto transport = make_nccl_transport(options);
    both_connected.arrive_and_wait();
    nccl_host_set_launch_polls(1 << 30);  // NCCL never gets to launch
    *has_failed = true;
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    transport->begin("stuck", {}, 60s);
    CHECK_THROWS_WITH_AS(transport->all_gather(bytes.bytes(), 32, stream.view()), "in stuck: a peer gave up",
                         TransportError);
  });
  nccl_host_set_launch_polls(2);
}

TEST_CASE("nccl: an interruption ends a start whose ranks are not connected yet") {
  const NoTraces no_traces;
  struct Interrupted {};
  for (const bool throws : {false, true}) {
    std::latch is_over(4);
    run_nccl_ranks(4, [&](int rank, NcclOptions options) {
      std::atomic<bool> is_interrupted = false;
      Reasons reasons;
      if (rank == 0) options.on_failure = reasons.recorder();
      options.peers = {rank ^ 1};
      options.interruption = [&]() -> std::string {
        if (!is_interrupted) return "";
        if (throws) throw Interrupted();
        return "enough";
      };
      const auto transport = make_nccl_transport(options);
      if (rank == 0) {
        is_interrupted = true;
        Stream stream;
        DeviceArray<unsigned char> bytes(64);
        const Send send{2, bytes.bytes(), 64};
        transport->begin("a message", {}, 60s);
        if (throws) {
          CHECK_THROWS_AS(transport->start({&send, 1}, {}, stream.view()), Interrupted);
          CHECK(reasons.only() == "in a message: was interrupted while it started a transfer");
        } else {
          CHECK_THROWS_WITH_AS(transport->start({&send, 1}, {}, stream.view()),
                               "in a message: gave up to start a transfer: enough", TransportError);
        }
      }
      is_over.arrive_and_wait();
    });
  }
}

TEST_CASE("nccl: what a device finds later is a failure, found by the watchdog or by the next call") {
  const NoTraces no_traces;
  for (const bool waits : {true, false}) {
    run_nccl_ranks(1, [&](int, NcclOptions options) {
      Reasons reasons;
      Reasons undefined;
      options.on_failure = reasons.recorder();
      options.on_undefined_bytes = undefined.recorder();
      const auto transport = make_nccl_transport(options);
      std::atomic<bool> is_known = false;
      transport->watch([] { return ""; });
      transport->watch([&]() -> std::optional<std::string> {
        if (is_known) return "wrong bytes";
        return std::nullopt;
      });
      std::this_thread::sleep_for(200ms);
      transport->begin("a call", {}, 60s);
      CHECK(reasons.none());
      is_known = true;
      if (waits) CHECK(undefined.only() == "wrong bytes");
      CHECK_THROWS_WITH_AS(transport->begin("the next", {}, 60s), doctest::Contains("wrong bytes"), TransportError);
      CHECK(reasons.only() == "wrong bytes");
      CHECK_THROWS_AS(transport->check(), TransportError);
    });
  }
}

TEST_CASE("nccl: transfers of a shorter timeout fail in time behind those of a longer one") {
  const NoTraces no_traces;
  run_beside_silent_rank([&](NcclOptions options) {
    Reasons reasons;
    options.on_failure = reasons.recorder();
    Waiting waiting(options);
    waiting.transport->begin("second", {}, 2s);
    waiting.transport->all_gather(waiting.bytes.bytes(), 32, waiting.stream.view())->wait(waiting.stream.view());
    CHECK(contains(reasons.only(), "in second: not done within the timeout, 2000 ms"));
  });
}

TEST_CASE("nccl: an error that NCCL meets later ends the transfer, with what a peer says") {
  const NoTraces no_traces;
  const auto both_waiting = std::make_shared<std::latch>(2);
  run_nccl_ranks(2, [&](int rank, NcclOptions options) {
    Reasons reasons;
    options.on_failure = reasons.recorder();
    if (rank == 0) options.peer_failure = [both_waiting] { return both_waiting->try_wait() ? "rank 1 fell over" : ""; };
    Waiting waiting(options, 60s, true);
    both_waiting->arrive_and_wait();
    constexpr int kRemoteError = 6;
    if (rank == 0) nccl_host_fail_rank(false, 0, kRemoteError);
    const std::string failure = rank == 0 ? waiting.failure() : std::string();
    if (rank == 0) {
      CHECK(contains(failure, "in all_gather of a test: NCCL could not go on: remote error (a test let it fail)"));
      CHECK(contains(failure, "(rank 1 fell over)"));
    } else {
      waiting.transport->abort("after the other");
      CHECK(contains(waiting.failure(), "after the other"));
    }
    nccl_host_hold_rank(rank, 0);
  });
}

TEST_CASE("nccl: what a peer says ends transfers under way") {
  const NoTraces no_traces;
  run_beside_silent_rank([&](NcclOptions options) {
    Reasons reasons;
    options.on_failure = reasons.recorder();
    const auto is_under_way = std::make_shared<std::atomic<bool>>(false);
    options.peer_failure = [is_under_way] { return *is_under_way ? "rank 1 gave up in its call" : ""; };
    Waiting waiting(options);
    *is_under_way = true;
    CHECK(contains(reasons.only(), "in all_gather of a test: rank 1 gave up in its call"));
    CHECK(contains(waiting.failure(), "rank 1 gave up in its call"));
  });
}

TEST_CASE("nccl: two sides that disagree on a size fail instead of writing past the end") {
  const NoTraces no_traces;
  run_nccl_ranks(2, [&](int rank, NcclOptions options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> bytes(100);
    bytes.set(std::vector<unsigned char>(100), stream);
    transport->begin("uneven", {}, 3s);
    const Send send{1, bytes.bytes(), 100};
    const Recv recv{0, bytes.bytes(), 60};
    std::string failure;
    try {
      if (rank == 0) transport->start({&send, 1}, {}, stream.view())->wait(stream.view());
      if (rank == 1) transport->start({}, {&recv, 1}, stream.view())->wait(stream.view());
      synchronize(stream.view());
      transport->begin("next", {}, 1s);
    } catch (const TransportError& error) {
      failure = error.what();
    }
    CHECK(contains(failure, rank == 0 ? "not done within the timeout" : "expects 60 bytes where rank 0 sends 100"));
  });
}

TEST_CASE("nccl: abort from another thread, also while a start waits for NCCL, and twice") {
  const NoTraces no_traces;
  std::latch both_connected(2);
  run_nccl_ranks(2, [&](int, NcclOptions options) {
    Reasons reasons;
    Reasons undefined;
    options.on_failure = reasons.recorder();
    options.on_undefined_bytes = undefined.recorder();
    const auto transport = make_nccl_transport(options);
    both_connected.arrive_and_wait();
    nccl_host_set_launch_polls(1 << 30);  // NCCL never gets to launch
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    transport->begin("stuck", {}, 60s);
    std::thread aborter([&] {
      std::this_thread::sleep_for(50ms);
      transport->abort("for a test");
      transport->abort("again");
    });
    CHECK_THROWS_WITH_AS(transport->all_gather(bytes.bytes(), 32, stream.view()), "for a test", TransportError);
    aborter.join();
    CHECK(reasons.only() == "for a test");
    CHECK(undefined.none());  // the call itself raised
    CHECK_THROWS_WITH_AS(transport->begin("next", {}, 1s), "this transport failed before: for a test", TransportError);
  });
  nccl_host_set_launch_polls(2);
}

TEST_CASE("nccl: a launch that takes longer than the timeout") {
  const NoTraces no_traces;
  std::latch both_connected(2);
  run_nccl_ranks(2, [&](int, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    both_connected.arrive_and_wait();
    nccl_host_set_launch_polls(1 << 30);
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    transport->begin("slow", {}, 50ms);
    CHECK_THROWS_WITH_AS(transport->all_gather(bytes.bytes(), 32, stream.view()),
                         "in slow: NCCL could not start a transfer in time", TimeoutError);
  });
  nccl_host_set_launch_polls(2);
}

TEST_CASE("nccl: abort races with starts and waits") {
  const NoTraces no_traces;
  for (int round = 0; round < 10; ++round) {
    run_nccl_ranks(3, [&](int rank, const NcclOptions& options) {
      const auto transport = make_nccl_transport(options);
      Stream stream;
      DeviceArray<unsigned char> bytes(96);
      bytes.set(std::vector<unsigned char>(96), stream);
      std::thread aborter([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(round + rank));
        transport->abort("for a test");
      });
      try {
        for (;;) {
          transport->begin("loop", {}, 60s);
          transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
        }
      } catch (const TransportError& error) {
        CHECK(contains(error.what(), "for a test"));
      }
      aborter.join();
      synchronize(stream.view());
    });
  }
}

TEST_CASE("nccl: a transfer that is given up takes the transport with it, and leaves its memory alone") {
  const NoTraces no_traces;
  std::latch both_done(2);
  run_nccl_ranks(2, [&](int rank, NcclOptions options) {
    const auto transport = make_nccl_transport(options);
    if (rank == 1) {
      both_done.arrive_and_wait();
      return;
    }
    Stream stream;
    {
      DeviceArray<unsigned char> bytes(64);
      bytes.set(std::vector<unsigned char>(64), stream);
      transport->begin("given up", {}, 60s);
      transport->all_gather(bytes.bytes(), 32, stream.view());
    }
    CHECK_THROWS_WITH_AS(transport->begin("next", {}, 1s),
                         doctest::Contains("in given up: this rank abandoned a transfer"), TransportError);
    both_done.arrive_and_wait();
  });
}

TEST_CASE("nccl: a transport that goes while its transfers are under way waits for them") {
  const NoTraces no_traces;
  nccl_host_set_link(1e6, 0);
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    Stream stream;
    DeviceArray<unsigned char> bytes(100'000);
    std::vector<unsigned char> initial(100'000);
    std::fill_n(initial.begin() + rank * 50'000, 50'000, static_cast<unsigned char>(rank + 1));
    bytes.set(initial, stream);
    {
      const auto transport = make_nccl_transport(options);
      transport->begin("slow link", {}, 60s);
      transport->all_gather(bytes.bytes(), 50'000, stream.view())->wait(stream.view());
    }
    CHECK(bytes.get(stream)[static_cast<std::size_t>(99'999 - rank * 99'999)] == 2 - rank);
  });
  nccl_host_set_link(0, 0);
}

}  // namespace zcomm
