// Tests of connections: which ranks have one, and what ends the wait for them.
#include <barrier>
#include <future>
#include <latch>
#include <mutex>

#include "nccl_tensors.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::DeviceArray;
using test::kChunkBytes;
using test::kLong;
using test::make_cuda_communicator;
using test::NoTraces;
using test::run_nccl_ranks;
using test::Stream;
using test::Tensors;

// Of a connection that fails before; a test that waits for it fails by the limit of its run.
constexpr auto kNever = 600s;
const BlockFormat kFormat = BlockFormat::parse("int8:128");

// A gather that fills a secondary shard, then one from it.
void gather_twice(Communicator& communicator, const Tensors& tensors, const Stream& stream) {
  const auto slots = tensors.slots();
  const Segment<BlockFormat> whole{tensors.elements, kFormat};
  const GatherPlan plan(communicator.world(), shape_of(slots), {&whole, 1});
  const DeviceArray<unsigned char> memory(plan.secondary_bytes());
  const auto kept = std::make_shared<SecondaryShard>();
  kept->memory = {memory.bytes(), memory.size()};
  const auto own = slots[static_cast<std::size_t>(communicator.rank())];
  test::gather(communicator, plan, own, slots, kLong, stream.view(), kept);
  test::gather_again(communicator, plan, slots, kept, kLong, stream.view());
  synchronize(stream.view());
}

// Exchanges bytes between all pairs of ranks.
void gather_in_one_hop(Communicator& communicator, const Tensors& tensors, const Stream& stream) {
  const auto slots = tensors.slots();
  const Segment<BlockFormat> whole{tensors.elements, kFormat};
  test::gather(communicator, {communicator.world(), shape_of(slots), {&whole, 1}, /*in_one_hop=*/true},
               slots[static_cast<std::size_t>(communicator.rank())], slots, kLong, stream.view());
}

// What ranks tell each other, as in the store of a group.
class Board {
 public:
  void share(NcclOptions& options) {
    options.connect_timeout = kNever;
    options.on_failure = [this, rank = options.rank](const std::string& reason) {
      const std::lock_guard lock(mutex_);
      if (text_.empty()) text_ = "rank " + std::to_string(rank) + " gave up: " + reason;
    };
    options.peer_failure = [this] {
      const std::lock_guard lock(mutex_);
      return text_;
    };
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

std::string failure_of(const NcclOptions& options) {
  try {
    make_nccl_transport(options);
  } catch (const TransportError& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

// Rule: a connection takes memory and time, also if nothing uses it. At 64 nodes of 8 all pairs are 511 for each rank.
TEST_CASE("nccl: ranks are connected with those of their hops, and rings are there for flat gathers alone") {
  const NoTraces no_traces;
  struct Group {
    std::vector<int> shape;
    long long num_peers;  // of each rank; a ring is one
  };
  for (const auto& [shape, num_peers] : {Group{{4}, 4}, Group{{2, 2}, 2}, Group{{2, 2, 2, 2}, 4}, Group{{2, 1}, 3}}) {
    const auto ids = test::node_ids(shape);
    const auto size = static_cast<int>(ids.size());
    const long long before = nccl_host_num_connections();
    std::barrier all(size);
    const auto expect_connections = [&, expected = size * num_peers * 2](int rank) {
      all.arrive_and_wait();
      if (rank == 0) CHECK(nccl_host_num_connections() - before == expected);
      all.arrive_and_wait();
    };
    run_nccl_ranks(size, [&](int rank, const NcclOptions& options) {
      const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
      expect_connections(rank);
      Stream stream;
      const Tensors tensors(size, 3);
      tensors.clear(stream);
      tensors.gather(*communicator, stream);
      tensors.scatter(*communicator, stream);
      tensors.all_reduce(*communicator, stream);
      gather_twice(*communicator, tensors, stream);
      expect_connections(rank);
    });
  }
}

TEST_CASE("nccl: calls between all pairs connect them; later ones may be captured") {
  const NoTraces no_traces;
  const auto ids = test::node_ids({2, 2});
  run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
    Stream stream;
    const Tensors tensors(4, 3);
    const auto expect = [&](const char* when) {
      CAPTURE(when);
      CHECK(tensors.whole.get(stream).back() == doctest::Approx(4).epsilon(0.01));
    };
    std::vector<float> values(static_cast<std::size_t>(tensors.elements) * 4, static_cast<float>(rank + 1));
    tensors.whole.set(values, stream);
    gather_in_one_hop(*communicator, tensors, stream);
    expect("eager");
    cudaGraphExec_t graph = test::capture(stream, [&] { gather_in_one_hop(*communicator, tensors, stream); });
    tensors.whole.set(values, stream);
    REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
    expect("graph");
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
  });
}

// Rule: NCCL connects what an algorithm needs when it first chooses that, and takes others for large gathers.
TEST_CASE("nccl: gathers of all sizes are connected at the start: a graph may capture the first") {
  const NoTraces no_traces;
  run_nccl_ranks(4, [&](int, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    for (const std::size_t slot_bytes : {std::size_t{16}, std::size_t{1} << 20}) {
      DeviceArray<unsigned char> slots(4 * slot_bytes);
      cudaGraphExec_t graph = test::capture(stream, [&] {
        transport->begin("a captured gather", {}, 60s, stream.view());
        transport->all_gather(slots.bytes(), slot_bytes, stream.view())->wait(stream.view());
      });
      REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
      synchronize(stream.view());
      REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
    }
  });
}

TEST_CASE("nccl: a rank that is interrupted while it connects ends the connections of all, and says why") {
  const NoTraces no_traces;
  Board board;
  run_nccl_ranks(4, [&](int rank, NcclOptions options) {
    if (rank == 3) return;  // never comes
    board.share(options);
    if (rank == 1) options.interruption = [] { return "because the group was aborted"; };
    const std::string own = "gave up to connect over NCCL: because the group was aborted";
    CHECK(failure_of(options) == (rank == 1 ? own : "gave up to connect over NCCL: rank 1 gave up: " + own));
  });
}

TEST_CASE("nccl: ranks that have met, but whose pairs are not connected, are interrupted, too") {
  const NoTraces no_traces;
  std::latch is_over(1);
  run_nccl_ranks(3, [&](int rank, NcclOptions options) {
    options.connect_timeout = kNever;
    if (rank > 0) {  // these do not know that they are peers of rank 0
      options.peers = {3 - rank};
      const auto transport = make_nccl_transport(options);
      is_over.wait();
      return;
    }
    int num_looks = 0;
    options.interruption = [&] { return ++num_looks < 3 ? "" : "enough"; };
    CHECK(failure_of(options) == "gave up to connect over NCCL: enough");
    is_over.count_down();
  });
}

TEST_CASE("nccl: a rank that fails before it connects tells its peers") {
  const NoTraces no_traces;
  run_nccl_ranks(1, [&](int, NcclOptions options) {
    const auto told = std::make_shared<std::promise<std::string>>();
    options.on_failure = [told](const std::string& reason) { told->set_value(reason); };
    cuda_host::fail_next_stream();
    CHECK_THROWS_WITH_AS(make_nccl_transport(options), doctest::Contains("could not create a stream"), Error);
    CHECK(told->get_future().get().find("could not create a stream") != std::string::npos);
  });
}

TEST_CASE("nccl: an interruption may throw what the caller knows") {
  const NoTraces no_traces;
  struct Interrupted {};
  std::string told;
  run_nccl_ranks(2, [&](int rank, NcclOptions options) {
    if (rank == 1) return;
    options.connect_timeout = kNever;
    options.interruption = []() -> std::string { throw Interrupted(); };
    options.on_failure = [&](const std::string& reason) { told = reason; };
    CHECK_THROWS_AS(make_nccl_transport(options), Interrupted);
  });
  CHECK(told == "was interrupted while it connected over NCCL");
}

TEST_CASE("nccl: a store that does not answer keeps no connection from its timeout") {
  const NoTraces no_traces;
  std::promise<std::string> answer;
  run_nccl_ranks(2, [&, answered = answer.get_future().share()](int rank, NcclOptions options) {
    if (rank == 1) return;
    options.connect_timeout = 500ms;
    options.peer_failure = [answered] { return answered.get(); };
    CHECK(failure_of(options) == "rank 0 of 2 could not connect over NCCL within 500 ms: not all ranks came");
  });
  answer.set_value("");
}

}  // namespace zcomm
