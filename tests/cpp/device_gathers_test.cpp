// Gathers by lossless differences on GPUs, over tests/cuda_host. The values are exact; the bytes are those of the CPU.
#include <doctest/doctest.h>

#include <barrier>
#include <thread>

#include "device_modules.hpp"
#include "sanitizers.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;

// Bytes that each rank of a gather on the CPU sends, step after step.
std::vector<std::vector<LinkBytes>> bytes_on_cpu(const std::vector<int>& ids, std::size_t length,
                                                 std::size_t chunk_bytes, int steps) {
  const auto communicators = test::make_communicators(ids, chunk_bytes);
  std::vector<std::vector<LinkBytes>> sent(ids.size());
  test::run_ranks(static_cast<int>(ids.size()), [&](int rank) {
    Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
    Halves whole(length * ids.size());
    const auto count = static_cast<std::int64_t>(length);
    const auto slots =
        split(TensorView{reinterpret_cast<std::byte*>(whole.data()), count * communicator.size(), DType::bfloat16},
              communicator.size(), count);
    const auto plan = std::make_shared<const LosslessPlan>(communicator.world(), shape_of(slots));
    std::vector<std::uint64_t> memory(plan->secondary_bytes() / 8 + 2);
    auto* data = reinterpret_cast<std::byte*>(memory.data());
    data += -reinterpret_cast<std::uintptr_t>(data) % 16;
    const auto kept = std::make_shared<SecondaryShard>();
    kept->memory = {data, plan->secondary_bytes()};
    const GatherPtr gather = make_lossless_gather(plan, kept);
    for (int step = 0; step < steps; ++step) {
      Halves shard = weights_of(rank, length, step);
      const ConstTensorView values{reinterpret_cast<std::byte*>(shard.data()), count, DType::bfloat16};
      const CallStats stats = communicator.run(*gather, {{&values, 1}, slots}, 20s);
      sent[static_cast<std::size_t>(rank)].push_back({stats.intra_node_bytes, stats.inter_node_bytes});
    }
  });
  return sent;
}

}  // namespace

TEST_CASE("device gathers: every value on every rank, again and again, for every shape, size and chunk") {
  const NoTraces no_traces;
  const std::vector<std::vector<int>> shapes{{1}, {3}, {1, 1, 1, 1}, {2, 2}, {3, 1}, {1, 2, 3}, {2, 2, 2}};
  for (const std::vector<int>& shape : shapes) {
    const std::vector<int> ids = test::node_ids(shape, /*interleaved=*/shape.size() == 3);
    for (const std::size_t length : {0, 1, 33, 10007}) {
      if (test::kThreadSanitizer && (length != 10007 || shape.size() != 2)) continue;
      run(ids, 8192, [&](Communicator& communicator) {
        Stream stream;
        std::vector<std::size_t> uneven = even(ids, length);
        for (std::size_t rank = 1; rank < ids.size(); ++rank) uneven[rank] = length / (rank + 1);
        Module first(communicator, even(ids, length), 0);
        Module second(communicator, uneven, 1, DType::byte_pairs);
        for (int step = 0; step < 4; ++step) {
          for (Module* module : {&first, &second}) module->set(step, stream);
          if (step != 2) prepare(communicator, {&first, &second}, stream.view());
          for (Module* module : {&second, &first}) {
            module->gather(stream.view());
            CHECK(module->output->get(stream) == module->expected(step));
            CHECK(module->kept->generation == static_cast<std::uint64_t>(step + 1));
            module->output->set(Halves(module->output->size(), 0xdead), stream);
            CHECK(module->gather_again(stream.view()).inter_node_bytes == 0);
            CHECK(module->output->get(stream) == module->expected(step));
          }
        }
      });
    }
  }
}

TEST_CASE("device gathers: the bytes of the CPU, headers ahead of gathers included") {
  const NoTraces no_traces;
  constexpr std::size_t kMany = 20'000;
  constexpr int kSteps = 3;
  for (const std::vector<int>& ids : {kTwoNodes, {0, 1, 2, 3}, {0, 0, 0, 1}}) {
    const auto expected = bytes_on_cpu(ids, kMany, 1 << 14, kSteps);
    run(ids, 1 << 14, [&](Communicator& communicator) {
      Stream stream;
      Module module(communicator, even(ids, kMany));
      for (int step = 0; step < kSteps; ++step) {
        module.set(step, stream);
        const CallStats ahead = prepare(communicator, {&module}, stream.view());
        const CallStats gather = module.gather(stream.view());
        const LinkBytes& sent = expected[static_cast<std::size_t>(communicator.rank())][static_cast<std::size_t>(step)];
        CHECK(ahead.intra_node_bytes + gather.intra_node_bytes == sent.intra_node);
        CHECK(ahead.inter_node_bytes + gather.inter_node_bytes == sent.inter_node);
        const auto receivers = static_cast<std::size_t>(communicator.topology().num_nodes() - 1);
        CHECK(receivers * module.kept->sent_bytes == sent.inter_node);
      }
      synchronize(stream.view());
    });
  }
}

TEST_CASE("device gathers: the host waits once for a batch, and a gather that was not prepared waits once") {
  const NoTraces no_traces;
  constexpr int kModules = 5;
  constexpr int kSteps = 6;
  std::barrier together(4);
  std::atomic<std::int64_t> waits_before = 0;
  run(kTwoNodes, 1 << 14, [&](Communicator& communicator) {
    Stream stream;
    std::vector<std::unique_ptr<Module>> modules;
    std::vector<Module*> all;
    for (int i = 0; i < kModules; ++i) {
      modules.push_back(std::make_unique<Module>(communicator, even(kTwoNodes, 9000), i));
      all.push_back(modules.back().get());
    }
    const auto step_of = [&](int step) {
      for (Module* module : all) module->set(step, stream);
      CHECK(prepare(communicator, all, stream.view()).host_waits == 1);
      for (Module* module : all) CHECK(module->gather(stream.view()).host_waits == 0);
      for (Module* module : all) CHECK(module->gather_again(stream.view()).host_waits == 0);
    };
    for (Module* module : all) module->set(0, stream);
    for (Module* module : all) CHECK(module->gather(stream.view()).host_waits == 1);
    step_of(1);
    step_of(2);
    synchronize(stream.view());
    together.arrive_and_wait();
    if (communicator.rank() == 0) waits_before = cuda_host::calls().host_waits;
    together.arrive_and_wait();
    for (int step = 3; step < 3 + kSteps; ++step) step_of(step);
    together.arrive_and_wait();
    if (communicator.rank() == 0) CHECK(cuda_host::calls().host_waits - waits_before == 4 * kSteps);
    together.arrive_and_wait();
    for (Module* module : all) CHECK(module->output->get(stream) == module->expected(2 + kSteps));
  });
}

TEST_CASE("device gathers: late operations, and calls on two streams, change nothing") {
  const NoTraces no_traces;
  cuda_host::set_delays(3, 300us);
  run(kTwoNodes, 1 << 14, [&](Communicator& communicator) {
    Stream stream;
    Stream another;
    Module first(communicator, even(kTwoNodes, 9000), 0);
    Module second(communicator, even(kTwoNodes, 9000), 1);
    for (int step = 0; step < 5; ++step) {
      first.set(step, stream);
      second.set(step, stream);
      prepare(communicator, {&first, &second}, stream.view());
      wait_for(another.view(), stream.view());
      first.gather(another.view());
      second.gather(stream.view());
      wait_for(stream.view(), another.view());
      CHECK(first.output->get(stream) == first.expected(step));
      CHECK(second.output->get(stream) == second.expected(step));
    }
  });
  cuda_host::set_delays(0, 0us);
}

TEST_CASE("device gathers: what is prepared is sent, once; prepared again it is sent whole") {
  const NoTraces no_traces;
  run(kTwoNodes, kDefaultChunkBytes, [&](Communicator& communicator) {
    Stream stream;
    Module module(communicator, even(kTwoNodes, 5000));
    module.set(0, stream);
    module.gather(stream.view());
    module.set(1, stream);
    prepare(communicator, {&module}, stream.view());
    CHECK_THROWS_WITH_AS(
        module.gather_again(stream.view()),
        doctest::Contains("secondary: expected shards that were gathered, got those of a gather that is "
                          "only prepared"),
        ArgumentError);
    module.set(2, stream);  // too late for the gather
    module.gather(stream.view());
    CHECK(module.output->get(stream) == module.expected(1));
    module.set(3, stream);
    prepare(communicator, {&module}, stream.view());
    module.set(4, stream);
    prepare(communicator, {&module}, stream.view());
    module.gather(stream.view());
    CHECK(module.output->get(stream) == module.expected(4));
    CHECK(module.kept->generation == 1);
    CHECK(module.kept->sent_bytes == 10'000 + kLosslessHeaderBytes);
    {
      Module dropped(communicator, even(kTwoNodes, 5000), 1);
      dropped.set(0, stream);
      prepare(communicator, {&dropped}, stream.view());
    }
    module.set(5, stream);
    module.gather(stream.view());
    CHECK(module.output->get(stream) == module.expected(5));
  });
}

TEST_CASE("device gathers: they are refused while a graph is captured, before a byte moves") {
  const NoTraces no_traces;
  run(kTwoNodes, kDefaultChunkBytes, [&](Communicator& communicator) {
    Stream stream;
    Module module(communicator, even(kTwoNodes, 5000));
    module.set(0, stream);
    module.gather(stream.view());
    const auto refused = doctest::Contains("stream: expected one that runs, got one that records a CUDA graph");
    const cudaGraphExec_t graph = test::capture(stream, [&] {
      CHECK_THROWS_WITH_AS(prepare(communicator, {&module}, stream.view()), refused, ArgumentError);
      CHECK_THROWS_WITH_AS(module.gather(stream.view()), refused, ArgumentError);
      CHECK_THROWS_WITH_AS(module.gather_again(stream.view()), refused, ArgumentError);
    });
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
    module.set(1, stream);
    module.gather(stream.view());
    CHECK(module.output->get(stream) == module.expected(1));
  });
}

TEST_CASE("device gathers: wrong arguments are refused before a byte moves") {
  const NoTraces no_traces;
  const auto on_cpu = test::make_communicators({0});
  CHECK_THROWS_WITH_AS(make_preparation({}), doctest::Contains("gathers: expected at least one"), ArgumentError);
  run({0}, kDefaultChunkBytes, [&](Communicator& communicator) {
    Module module(communicator, {5});
    const OperationPtr preparation = make_preparation({module.operation});
    const ConstTensorView shard = module.shard_view();
    CHECK_THROWS_WITH_AS(on_cpu[0]->run(*preparation, {{&shard, 1}}, kTimeout),
                         doctest::Contains("codec: expected that of a GPU"), ArgumentError);
    CHECK_THROWS_WITH_AS(prepare(communicator, {&module, &module}, {}), doctest::Contains("got one twice"),
                         ArgumentError);
    const ConstTensorView longer{module.shard.bytes(), 6, DType::bfloat16};
    CHECK_THROWS_WITH_AS(communicator.run(*preparation, {{&longer, 1}}, kTimeout),
                         doctest::Contains("inputs: expected 5 elements of bfloat16, as was planned, got 6"),
                         ArgumentError);
    CHECK_THROWS_WITH_AS(module.gather_again({}),
                         doctest::Contains("secondary: expected shards that an all_gather by differences has filled"),
                         ArgumentError);
  });
}

}  // namespace zcomm
