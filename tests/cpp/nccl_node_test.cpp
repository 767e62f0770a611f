// Tests of the communicators that the ranks of a node have among themselves, where there are several nodes.
#include <algorithm>
#include <atomic>
#include <thread>

#include "nccl_tensors.hpp"
#include "reasons.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::contains;
using test::kChunkBytes;
using test::make_cuda_communicator;
using test::NoTraces;
using test::Reasons;
using test::run_nccl_ranks;
using test::Stream;
using test::Tensors;

constexpr int kRemoteError = 6;

// A rank of two nodes of two, which has made a call.
struct Rank {
  explicit Rank(const NcclOptions& options)
      : communicator(make_cuda_communicator(test::node_ids({2, 2}), kChunkBytes, options)) {
    tensors.clear(stream);
    tensors.gather(*communicator, stream);
    synchronize(stream.view());
  }
  std::unique_ptr<Communicator> communicator;
  Stream stream;
  Tensors tensors{4, 2};
};

void wait_for_all(std::atomic<int>& num_there) {
  const int last = ++num_there + 3;
  while (num_there < last / 4 * 4) std::this_thread::sleep_for(1ms);
}

struct Held {
  explicit Held(int rank) : rank_(rank) { nccl_host_hold_rank(rank_, 1); }
  ~Held() { nccl_host_hold_rank(rank_, 0); }
  int rank_;
};

}  // namespace

TEST_CASE("nccl: each node of several has a communicator if one has two ranks") {
  const NoTraces no_traces;
  const int before = nccl_host_live_communicators();
  struct Shape {
    std::vector<int> sizes;
    int num_communicators;
  };
  for (const auto& [sizes, num_communicators] :
       {Shape{{2, 2}, 8}, {{3, 1}, 8}, {{1, 1, 2}, 8}, {{4}, 4}, {{1, 1, 1}, 3}, {{1}, 1}}) {
    const std::vector<int> ids = test::node_ids(sizes);
    CAPTURE(Topology(ids).to_string());
    std::atomic<int> num_made = 0;
    run_nccl_ranks(static_cast<int>(ids.size()), [&](int, const NcclOptions& options) {
      const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
      ++num_made;
      while (num_made < static_cast<int>(ids.size())) std::this_thread::sleep_for(1ms);
      CHECK(nccl_host_live_communicators() - before == num_communicators);
      ++num_made;
      while (num_made < 2 * static_cast<int>(ids.size())) std::this_thread::sleep_for(1ms);
    });
    CHECK(nccl_host_live_communicators() == before);
  }
}

TEST_CASE("nccl: an error of a node's communicator ends the group") {
  const NoTraces no_traces;
  const int before = nccl_host_live_communicators();
  std::atomic<int> num_there = 0;
  run_nccl_ranks(4, [&](int rank, NcclOptions options) {
    Reasons reasons;
    options.on_failure = reasons.recorder();
    const Rank own(options);
    wait_for_all(num_there);
    const Held held(rank);  // so that the next call does not end
    own.tensors.gather(*own.communicator, own.stream);
    wait_for_all(num_there);
    if (rank == 0) nccl_host_fail_rank(true, 0, kRemoteError);
    if (rank % 2 != 0) return own.communicator->abort("a peer gave up");
    CHECK(contains(reasons.only(), "NCCL could not go on: remote error"));
    CHECK_THROWS_WITH_AS(own.tensors.gather(*own.communicator, own.stream), doctest::Contains("remote error"),
                         TransportError);
  });
  CHECK(nccl_host_live_communicators() == before);
}

// Rule: an abort frees memory. Freeing waits for all kernels on the device, also for those of the other communicator.
TEST_CASE("nccl: an abort ends transfers between nodes and inside, at once") {
  const NoTraces no_traces;
  const int before = nccl_host_live_communicators();
  std::atomic<int> num_there = 0;
  run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
    const auto own = std::make_unique<Rank>(options);
    wait_for_all(num_there);
    if (rank == 3) {  // never comes to the call: both of its peers wait, one in its node, one outside
      while (num_there < 7) std::this_thread::sleep_for(1ms);
      return;
    }
    own->tensors.gather(*own->communicator, own->stream);
    std::this_thread::sleep_for(50ms);
    const Clock::time_point start = Clock::now();
    own->communicator->abort("for a test");
    synchronize(own->stream.view());
    own->communicator.reset();
    CHECK(Clock::now() - start < 8s);  // after 10 s it would be left behind
    ++num_there;
  });
  CHECK(nccl_host_live_communicators() == before);
}

TEST_CASE("nccl: ranks that wait for another to connect in its node give up in time, and nothing is left") {
  const NoTraces no_traces;
  const int before = nccl_host_live_communicators();
  const Held held(3);
  run_nccl_ranks(4, [&](int, NcclOptions options) {
    options.connect_timeout = 500ms;
    CHECK_THROWS_WITH_AS(make_cuda_communicator(test::node_ids({2, 2}), kChunkBytes, options),
                         doctest::Contains("could not connect over NCCL within 500 ms"), TransportError);
  });
  CHECK(nccl_host_live_communicators() == before);
}

TEST_CASE("nccl: node_ids that are too few or differ between ranks are refused") {
  const NoTraces no_traces;
  run_nccl_ranks(4, [&](int rank, NcclOptions options) {
    options.node_ids = {0, 0, 1};
    CHECK_THROWS_WITH_AS(make_nccl_transport(options), "node_ids: expected 4 identifiers, got 3", ArgumentError);
    options.node_ids = rank == 0 ? std::vector{0, 0, 0, 1} : std::vector{0, 0, 1, 1};
    options.connect_timeout = 2s;
    CHECK_THROWS_WITH_AS(
        make_nccl_transport(options),
        doctest::Contains(rank == 0 ? "expected equal ones on all ranks, got a node of 3 ranks" : "rank"),
        TransportError);
  });
}

}  // namespace zcomm
