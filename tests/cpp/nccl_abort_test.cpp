// Tests that a failure ends in time, in every state: the remaining ranks go on, with a reason, and close.
#include <array>
#include <atomic>
#include <sstream>

#include "calls.hpp"
#include "cuda_helpers.hpp"
#include "rank_process.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::DeviceArray;
using test::Stream;

constexpr std::size_t kChunkBytes = 1024;

// Case: the fault, the number of chunks, the nodes, and whether a graph has captured a call before.
struct Case {
  std::string failure;  // "killed", "absent", "abort"
  int num_chunks = 1;
  bool is_hierarchical = false;
  bool has_graph = false;

  std::vector<int> node_ids() const { return is_hierarchical ? test::node_ids({2, 2}) : test::node_ids({2}); }
  int size() const { return static_cast<int>(node_ids().size()); }
  std::string text() const {
    std::ostringstream out;
    out << failure << " " << num_chunks << " " << is_hierarchical << " " << has_graph;
    return out.str();
  }
  static Case parse(const std::string& text) {
    Case parsed;
    std::istringstream(text) >> parsed.failure >> parsed.num_chunks >> parsed.is_hierarchical >> parsed.has_graph;
    return parsed;
  }
};

// One rank, with a tensor of every rank's slots.
struct Rank {
  Rank(const Case& of, const NcclOptions& options)
      : elements(of.num_chunks * static_cast<std::int64_t>(kChunkBytes / 4)),
        size(of.size()),
        communicator(test::make_cuda_communicator(of.node_ids(), kChunkBytes, options)),
        tensor(static_cast<std::size_t>(elements * size)),
        part(static_cast<std::size_t>(elements)) {
    tensor.set(std::vector<float>(static_cast<std::size_t>(elements * size)), stream);
  }
  void call(std::chrono::milliseconds timeout) {
    const auto slots = split(TensorView{tensor.bytes(), elements * size, DType::float32}, size, elements);
    const HopFormats formats = HopFormats::parse("int8:128/int4:128");
    test::all_gather(*communicator, slots[static_cast<std::size_t>(communicator->rank())], slots, formats.intra_node,
                     timeout, stream.view());
    const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
    test::reduce_scatter(*communicator, inputs, {part.bytes(), elements, DType::float32}, formats, 1, timeout,
                         stream.view());
  }

  std::int64_t elements;
  int size;
  std::unique_ptr<Communicator> communicator;
  Stream stream;
  DeviceArray<float> tensor;
  DeviceArray<float> part;
};

void run_rank(const Case& of, const NcclOptions& options) {
  const bool is_bad = options.rank == of.size() - 1;
  Rank rank(of, options);
  rank.call(60s);
  synchronize(rank.stream.view());
  cudaGraphExec_t graph = nullptr;
  if (of.has_graph) graph = test::capture(rank.stream, [&] { rank.call(60s); });
  if (is_bad && of.failure == "killed") std::raise(SIGKILL);
  if (is_bad) std::this_thread::sleep_for(600s);  // until it is killed, too

  std::thread aborter;
  if (of.failure == "abort") {
    aborter = std::thread([&] {
      std::this_thread::sleep_for(50ms);
      rank.communicator->abort("for a test");
    });
  }
  try {
    for (int i = 0; i < 3; ++i) rank.call(of.failure == "abort" ? 600s : 200ms);
  } catch (const TransportError&) {
    // Caught: the failure came while there was more to queue.
  }
  synchronize(rank.stream.view());
  if (aborter.joinable()) aborter.join();
  // The all_gather, or on a busy machine a reduce_scatter that could not even start in time.
  CHECK_THROWS_WITH_AS(rank.call(1s), doctest::Contains(of.failure == "abort" ? "for a test" : " float32["),
                       TransportError);
  rank.communicator.reset();
  if (graph != nullptr) REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
}

}  // namespace

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("the ranks that are left when one fails" * doctest::skip()) {
  if (std::getenv("NCCL_TEST_CASE") == nullptr) return;
  const Case of = Case::parse(std::getenv("NCCL_TEST_CASE"));
  const bool is_bad = std::getenv("NCCL_TEST_IS_BAD") != nullptr;
  const NcclUniqueId id = test::id_from_hex(std::getenv("NCCL_TEST_ID"));
  const auto run = [&](int rank) {
    const CudaDeviceGuard device(rank);
    NcclOptions options;
    options.unique_id = id;
    options.rank = rank;
    options.size = of.size();
    options.connect_timeout = 60s;
    run_rank(of, options);
  };
  if (is_bad) {
    run(of.size() - 1);
  } else {
    test::run_ranks(of.size() - 1, run);
    CHECK(std::string(nccl_host_take_misuse()) == "");
    CHECK(cuda_host::num_bytes_written_after_free() == 0);
  }
}

// Rule: NCCL's abort returns when all work launched on its communicator and every graph that captured it is gone. A
// launched transfer ends when its own communicator is aborted. Each case runs in processes that are killed if they
// hang: zcomm's abort must return although NCCL's waits for launched work and graphs.
TEST_CASE(
    "nccl: a peer that is killed or absent, or an abort, ends calls of any number of chunks, with and without a "
    "graph") {
  std::vector<Case> cases;
  for (const char* failure : {"killed", "absent", "abort"}) {
    for (const int num_chunks : {1, 8, 64}) {
      for (const bool is_hierarchical : {false, true}) {
        for (const bool has_graph : {false, true}) cases.push_back({failure, num_chunks, is_hierarchical, has_graph});
      }
    }
  }
  const char* limit = std::getenv("ZCOMM_TEST_HANG_SECONDS");
  const std::chrono::seconds patience(limit == nullptr ? 120 : std::atoi(limit));
  std::atomic<std::size_t> next = 0;
  std::vector<std::string> outcomes(cases.size());
  test::run_ranks(4, [&](int) {  // so many at once
    for (std::size_t i = next++; i < cases.size(); i = next++) {
      const std::string id = "NCCL_TEST_ID=" + test::to_hex(make_nccl_unique_id());
      const std::string text = "NCCL_TEST_CASE=" + cases[i].text();
      constexpr const char* kCase = "the ranks that are left when one fails";
      const pid_t bad = test::spawn_case(kCase, {id, text, "NCCL_TEST_IS_BAD=1"});
      outcomes[i] = test::outcome_of(test::spawn_case(kCase, {id, text}), patience);
      kill(bad, SIGKILL);
      waitpid(bad, nullptr, 0);
    }
  });
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& of = cases[i];
    const std::string what = of.failure + ", " + std::to_string(of.num_chunks) + " chunks, " +
                             (of.is_hierarchical ? "2x2" : "2") + (of.has_graph ? ", a live graph" : "") + ": ";
    CHECK(what + outcomes[i] == what + "ends well");
  }
}

}  // namespace zcomm
