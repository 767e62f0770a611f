// Tests of a watchdog that CUDA or NCCL keeps: what it watches for is seen all the same, and the process may end.
#include <doctest/doctest.h>

#include <latch>

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
using test::Stream;

// What keeps the watchdog while an object lives.
struct Kept {
  explicit Kept(bool in_cuda) : in_cuda_(in_cuda), before_(count()) { set(true); }
  ~Kept() { set(false); }
  // Waits until a call is kept.
  bool is_planted() const {
    for (const auto latest = Clock::now() + 60s; Clock::now() < latest; std::this_thread::sleep_for(1ms)) {
      if (count() > before_) return true;
    }
    return false;
  }

 private:
  int count() const { return in_cuda_ ? cuda_host::num_kept_event_queries() : nccl_host_num_kept_error_queries(); }
  void set(bool keeps) const { in_cuda_ ? cuda_host::keep_event_queries(keeps) : nccl_host_keep_error_queries(keeps); }

  bool in_cuda_;
  int before_;
};

// Runs body(waits) on rank 0 of two, where waits() makes a call to which rank 1 does not come.
template <class Body>
void run_with_silent_peer(NcclOptions given, std::chrono::milliseconds timeout, Body&& body) {
  std::latch both_done(2);
  test::run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    if (rank == 1) {
      const auto transport = make_nccl_transport(options);
      both_done.arrive_and_wait();
      return;
    }
    given.unique_id = options.unique_id;
    given.size = 2;
    const auto transport = make_nccl_transport(given);
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    bytes.set(std::vector<unsigned char>(64), stream);
    transport->begin("all_gather of a test", {}, timeout);
    transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
    body();
    transport->abort("the test is over");
    synchronize(stream.view());
    both_done.arrive_and_wait();
  });
}

}  // namespace

TEST_CASE("nccl: a deadline is seen while CUDA or NCCL keeps the watchdog") {
  const NoTraces no_traces;
  for (const bool in_cuda : {true, false}) {
    CAPTURE(in_cuda);
    Reasons failure;
    NcclOptions options;
    options.on_failure = failure.recorder();
    run_with_silent_peer(options, 4s, [&] {
      const Kept kept(in_cuda);
      CHECK(kept.is_planted());
      CHECK(contains(failure.only(), "in all_gather of a test: not done within the timeout, 4000 ms"));
    });
  }
}

TEST_CASE("nccl: what a peer says is heard while CUDA or NCCL keeps the watchdog") {
  const NoTraces no_traces;
  for (const bool in_cuda : {true, false}) {
    CAPTURE(in_cuda);
    Reasons failure;
    NcclOptions options;
    const auto has_failed = std::make_shared<std::atomic<bool>>(false);
    options.on_failure = failure.recorder();
    options.peer_failure = [has_failed] { return *has_failed ? "a peer gave up" : ""; };
    run_with_silent_peer(options, 60s, [&] {
      const Kept kept(in_cuda);
      CHECK(kept.is_planted());
      *has_failed = true;
      CHECK(failure.only() == "in all_gather of a test: a peer gave up");
    });
  }
}

TEST_CASE("nccl: a watchdog that does not come round is told, with what keeps it") {
  const NoTraces no_traces;
  for (const bool in_cuda : {true, false}) {
    CAPTURE(in_cuda);
    Reasons stuck;
    NcclOptions options;
    options.heartbeat = 1s;
    options.on_stuck = stuck.recorder();
    run_with_silent_peer(options, 60s, [&] {
      const Kept kept(in_cuda);
      CHECK(kept.is_planted());
      const std::string text = stuck.only();
      CHECK(contains(text, "in all_gather of a test: "));
      CHECK(contains(text, in_cuda ? "cudaEventQuery" : "ncclCommGetAsyncError"));
    });
  }
}

}  // namespace zcomm
