// Comparison of calls over NCCL.
#include <atomic>
#include <thread>

#include "calls.hpp"
#include "cuda_helpers.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/exchange.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::DeviceArray;
using test::make_cuda_communicator;
using test::node_ids;
using test::NoTraces;
using test::run_nccl_ranks;
using test::Stream;

// A rank that gathers float32 in place, in any format.
class Rank {
 public:
  Rank(const std::vector<int>& ids, const NcclOptions& options, std::int64_t shard_elements = 256)
      : size(static_cast<int>(ids.size())),
        shard_elements(shard_elements),
        communicator(make_cuda_communicator(ids, 1024, options)),
        values(static_cast<std::size_t>(size * shard_elements)) {
    values.set(std::vector<float>(static_cast<std::size_t>(size * shard_elements)), stream);
  }

  void gather(const char* format) {
    const auto slots = split(whole(), size, shard_elements);
    test::all_gather(*communicator, slots[static_cast<std::size_t>(communicator->rank())], slots,
                     BlockFormat::parse(format), 60s, stream.view());
  }
  // Gathers until an error comes, and returns its text.
  std::string failure_of_gathers(const char* format) {
    for (int i = 0; i < 500; ++i) {
      try {
        gather(format);
        std::this_thread::sleep_for(20ms);
      } catch (const TransportError& error) {
        return error.what();
      }
    }
    return {};
  }
  TensorView whole() const { return {values.bytes(), size * shard_elements, DType::float32}; }

  int size;
  std::int64_t shard_elements;
  std::unique_ptr<Communicator> communicator;
  Stream stream;
  DeviceArray<float> values;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("promise 8: calls that differ, with messages of equal size, fail on every rank with both in words") {
  const NoTraces no_traces;
  for (const auto& ids : {node_ids({2}), node_ids({3}), node_ids({2, 2})}) {
    run_nccl_ranks(static_cast<int>(ids.size()), [&](int number, const NcclOptions& options) {
      Rank rank(ids, options);
      rank.gather("int4:128");
      const std::string failure = rank.failure_of_gathers(number % 2 == 0 ? "int8:128" : "fp8:128");
      INFO(failure);
      CHECK(contains(failure,
                     "ranks called different things: rank " + std::to_string(number) + " \"all_gather float32["));
      CHECK(contains(failure, "int8:128"));
      CHECK(contains(failure, "fp8:128"));
    });
  }
}

TEST_CASE("nccl comparison: ranks that agree on something else learn so as they connect") {
  const NoTraces no_traces;
  run_nccl_ranks(2, [&](int number, NcclOptions options) {
    options.agreement = number == 0 ? "nodes 0 0" : "nodes 0 1";
    CHECK_THROWS_WITH_AS(
        make_nccl_transport(options),
        doctest::Contains(("ranks called different things: rank " + std::to_string(number) + " \"nodes 0").c_str()),
        TransportError);
  });
}

// The other rank has compared its call before, and sends values in place of words.
TEST_CASE("nccl comparison: a call that is new on one rank alone is an error there, in words") {
  const NoTraces no_traces;
  run_nccl_ranks(2, [&](int number, const NcclOptions& options) {
    Rank rank(node_ids({2}), options, sizeof(CallText) / sizeof(float));
    rank.values.set(std::vector<float>(static_cast<std::size_t>(2 * rank.shard_elements), 1.0f / 3), rank.stream);
    rank.gather("exact");
    if (number == 0) {
      rank.gather("exact");
      synchronize(rank.stream.view());
      return;
    }
    const std::string failure = rank.failure_of_gathers("bf16");
    INFO(failure);
    CHECK(contains(failure, "rank 0 \"something that it has called before\""));
  });
}

// Rule: the host does not wait for peers that it is not connected with. The late rank waits for the others' hosts.
TEST_CASE("nccl comparison: of a broadcast on several nodes, it blocks no host") {
  const NoTraces no_traces;
  std::atomic<int> num_back = 0;
  run_nccl_ranks(4, [&](int number, const NcclOptions& options) {
    Rank rank(node_ids({2, 2}), options);
    while (number == 3 && num_back < 3) std::this_thread::sleep_for(1ms);
    test::broadcast(*rank.communicator, rank.whole(), 0, BlockFormat::parse("int8:128"), 60s, rank.stream.view());
    ++num_back;
    synchronize(rank.stream.view());
  });
  CHECK(num_back == 4);
}

// Rule: NCCL does not keep a sender of few bytes waiting for the receiver, so nothing else may.
TEST_CASE("nccl comparison: messages between two ranks of more have none") {
  const NoTraces no_traces;
  const int before = nccl_host_num_launches();
  run_nccl_ranks(3, [&](int number, const NcclOptions& options) {
    const Rank rank(node_ids({3}), options);
    if (number == 2) return;
    const auto operation = make_exchange(
        ExchangePlan::message(rank.communicator->world(), 0, 1, rank.shard_elements, DType::float32, HopFormats{}));
    const auto slots = split(rank.whole(), 3, rank.shard_elements);
    std::vector<ConstTensorView> inputs(3, ConstTensorView{nullptr, 0, DType::float32});
    std::vector<TensorView> outputs(3, TensorView{nullptr, 0, DType::float32});
    if (number == 0) inputs[1] = slots[0];
    if (number == 1) outputs[0] = slots[1];
    rank.communicator->run(*operation, {inputs, outputs}, 60s, rank.stream.view());
    synchronize(rank.stream.view());
  });
  CHECK(nccl_host_num_launches() - before == 3 * 3 + 2);  // three of each rank to connect, and one of two
}

}  // namespace zcomm
