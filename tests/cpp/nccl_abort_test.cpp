// Tests that a failure ends in time, in every state: the remaining ranks go on, with a reason, and close.
#include <atomic>
#include <latch>
#include <mutex>
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

// Case: what happens to the last rank, the numbers of chunks, nodes and ranks per node, and whether a graph runs, too.
struct Case {
  std::string failure;  // "killed", "late", "abort"; "killed-first", "abort-first": while it connects
  int num_chunks = 1;
  int num_nodes = 1;
  int node_size = 1;
  bool has_graph = false;

  bool is_first() const { return failure.ends_with("-first"); }
  bool is_killed() const { return failure.starts_with("killed"); }
  bool is_abort() const { return failure.starts_with("abort"); }
  int size() const { return num_nodes * node_size; }
  std::vector<int> node_ids() const {
    return test::node_ids(std::vector<int>(static_cast<std::size_t>(num_nodes), node_size));
  }
  std::string text() const {
    std::ostringstream out;
    out << failure << " " << num_chunks << " " << num_nodes << " " << node_size << " " << has_graph;
    return out.str();
  }
  static Case parse(const std::string& text) {
    Case parsed;
    std::istringstream(text) >> parsed.failure >> parsed.num_chunks >> parsed.num_nodes >> parsed.node_size >>
        parsed.has_graph;
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

// State of the ranks of a process.
struct Ranks {
  const Case of;
  std::latch are_done{of.size() - 1};  // the ranks that are left
  std::mutex mutex;
  std::string reason;  // of the first failure, as in a group's store
};

// Connects, or fails because the last rank is killed, or another one aborts, meanwhile.
void connect_in_vain(Ranks& ranks, NcclOptions options) {
  const bool is_bad = options.rank == ranks.of.size() - 1;
  options.connect_timeout = 600s;
  if (is_bad) options.interruption = []() -> std::string { std::raise(SIGKILL), std::abort(); };
  // With a killed rank another one finds out that it is gone, as by its heartbeats.
  if (options.rank == 0) options.interruption = [] { return "for a test"; };
  options.on_failure = [&](const std::string& reason) {
    const std::lock_guard lock(ranks.mutex);
    if (ranks.reason.empty()) ranks.reason = reason;
  };
  options.peer_failure = [&] {
    const std::lock_guard lock(ranks.mutex);
    return ranks.reason;
  };
  CHECK_THROWS_WITH_AS(Rank(ranks.of, options), doctest::Contains("for a test"), TransportError);
}

void run_rank(Ranks& ranks, const NcclOptions& options) {
  const Case& of = ranks.of;
  const bool is_bad = options.rank == of.size() - 1;
  Rank rank(of, options);
  rank.call(60s);
  synchronize(rank.stream.view());
  cudaGraphExec_t graph = nullptr;
  if (of.has_graph) graph = test::capture(rank.stream, [&] { rank.call(60s); });
  if (is_bad && of.is_killed()) std::raise(SIGKILL);
  if (is_bad) ranks.are_done.wait();

  std::thread aborter;
  if (of.is_abort() && !is_bad) {
    aborter = std::thread([&] {
      std::this_thread::sleep_for(50ms);
      rank.communicator->abort("for a test");
    });
  }
  if (graph != nullptr) REQUIRE(cudaGraphLaunch(graph, rank.stream) == cudaSuccess);
  try {
    for (int i = 0; i < 3; ++i) rank.call(aborter.joinable() ? 600s : 200ms);
  } catch (const TransportError&) {
    // Caught: the failure came while there was more to queue.
  }
  synchronize(rank.stream.view());
  const bool was_aborted = aborter.joinable();
  if (was_aborted) aborter.join();
  // The all_gather, or on a busy machine a reduce_scatter that could not even start in time.
  CHECK_THROWS_WITH_AS(rank.call(1s), doctest::Contains(was_aborted ? "for a test" : " float32["), TransportError);
  if (!is_bad) ranks.are_done.count_down();
  rank.communicator.reset();
  if (graph != nullptr) REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
}

}  // namespace

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("the ranks that are left when one fails" * doctest::skip()) {
  if (std::getenv("NCCL_TEST_CASE") == nullptr) return;
  Ranks ranks{Case::parse(std::getenv("NCCL_TEST_CASE"))};
  const Case& of = ranks.of;
  const bool is_bad = std::getenv("NCCL_TEST_IS_BAD") != nullptr;
  const NcclUniqueId id = test::id_from_hex(std::getenv("NCCL_TEST_ID"));
  const auto run = [&](int rank) {
    const CudaDeviceGuard device(rank);
    NcclOptions options;
    options.unique_id = id;
    options.rank = rank;
    options.size = of.size();
    options.connect_timeout = 60s;
    of.is_first() ? connect_in_vain(ranks, options) : run_rank(ranks, options);
  };
  if (is_bad) {
    run(of.size() - 1);
  } else {
    const bool is_last_elsewhere = of.is_killed() || of.is_first();
    test::run_ranks(of.size() - (is_last_elsewhere ? 1 : 0), run);
    CHECK(std::string(nccl_host_take_misuse()) == "");
    CHECK(cuda_host::num_bytes_written_after_free() == 0);
  }
}

// Rule: NCCL's abort returns when all work launched on its communicator and every graph that captured it is gone. A
// launched transfer ends when its own communicator is aborted. Each case runs in processes that are killed if they
// hang: zcomm's abort must return although NCCL's waits for launched work and graphs.
TEST_CASE(
    "nccl: a peer that is killed or late, or an abort, ends calls of any number of chunks, first calls, and graphs") {
  std::vector<Case> cases;
  for (const auto& [num_nodes, node_size] : {std::pair{2, 1}, {2, 2}, {4, 2}}) {
    for (const char* failure : {"killed-first", "abort-first"}) cases.push_back({failure, 1, num_nodes, node_size});
    for (const char* failure : {"killed", "late", "abort"}) {
      for (const int num_chunks : {1, 8, 64}) {
        for (const bool has_graph : {false, true}) {
          cases.push_back({failure, num_chunks, num_nodes, node_size, has_graph});
        }
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
      pid_t killed = 0;
      if (cases[i].is_killed()) killed = test::spawn_case(kCase, {id, text, "NCCL_TEST_IS_BAD=1"});
      outcomes[i] = test::outcome_of(test::spawn_case(kCase, {id, text}), patience);
      if (killed != 0) test::outcome_of(killed, 10s);
    }
  });
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& of = cases[i];
    const std::string what = of.failure + ", " + std::to_string(of.num_chunks) + " chunks, " +
                             std::to_string(of.num_nodes) + "x" + std::to_string(of.node_size) +
                             (of.has_graph ? ", a graph" : "") + ": ";
    CHECK(what + outcomes[i] == what + "ends well");
  }
}

}  // namespace zcomm
