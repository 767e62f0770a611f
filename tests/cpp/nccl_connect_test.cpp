// Tests of connections: which ranks have one, and what ends the wait for them.
#include <barrier>

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

const BlockFormat kFormat = BlockFormat::parse("int8:128");

// A gather that fills a secondary shard, then one from it.
void gather_twice(Communicator& communicator, const Tensors& tensors, const Stream& stream) {
  const auto slots = tensors.slots();
  const Segment<BlockFormat> whole{tensors.elements, kFormat};
  const GatherPlan plan(communicator.world(), shape_of(slots), {&whole, 1});
  const DeviceArray<unsigned char> memory(plan.secondary_bytes());
  const auto kept = std::make_shared<Kept>();
  kept->memory = {memory.bytes(), memory.size()};
  const auto own = slots[static_cast<std::size_t>(communicator.rank())];
  test::gather(communicator, plan, own, slots, kLong, stream.view(), kept);
  test::gather_again(communicator, plan, slots, kept, kLong, stream.view());
  synchronize(stream.view());
}

// The calls that exchange bytes between all pairs of ranks.
void reduce_directly(Communicator& communicator, const Tensors& tensors, const Stream& stream) {
  const auto slots = tensors.slots();
  test::reduce_scatter(communicator, std::vector<ConstTensorView>(slots.begin(), slots.end()),
                       {tensors.part.bytes(), tensors.elements, DType::float32}, kDirect, 1, kLong, stream.view());
}

void gather_in_one_hop(Communicator& communicator, const Tensors& tensors, const Stream& stream) {
  const auto slots = tensors.slots();
  const Segment<BlockFormat> whole{tensors.elements, kFormat};
  test::gather(communicator, {communicator.world(), shape_of(slots), {&whole, 1}, /*in_one_hop=*/true},
               slots[static_cast<std::size_t>(communicator.rank())], slots, kLong, stream.view());
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
  for (const auto call : {&reduce_directly, &gather_in_one_hop}) {
    run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
      const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
      Stream stream;
      const Tensors tensors(4, 3);
      const auto expect = [&](const char* when) {
        CAPTURE(when);
        if (call == &reduce_directly) CHECK(tensors.part.get(stream).back() == 10.0f);
        if (call == &gather_in_one_hop) CHECK(tensors.whole.get(stream).back() == doctest::Approx(4).epsilon(0.01));
      };
      std::vector<float> values(static_cast<std::size_t>(tensors.elements) * 4, static_cast<float>(rank + 1));
      tensors.whole.set(values, stream);
      call(*communicator, tensors, stream);
      expect("eager");
      cudaGraphExec_t graph = test::capture(stream, [&] { call(*communicator, tensors, stream); });
      tensors.whole.set(values, stream);
      REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
      expect("graph");
      REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
    });
  }
}

}  // namespace zcomm
