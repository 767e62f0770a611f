// Rules of NCCL and CUDA that a GPU does not enforce at once: one order of launches, no wait for peers where the host
// must not block, nothing freed that a graph still uses.
#include <array>
#include <atomic>
#include <barrier>
#include <future>
#include <latch>
#include <thread>

#include "nccl_tensors.hpp"
#include "rank_process.hpp"
#include "transport/nccl_symbols.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::DeviceArray;
using test::kChunkBytes;
using test::make_cuda_communicator;
using test::NoTraces;
using test::run_nccl_ranks;
using test::Stream;
using test::Tensors;

// Runs a skipped test case of this file in a separate process, because it may hang.
std::string outcome_of_case(const char* name) {
  const char* limit = std::getenv("ZCOMM_TEST_HANG_SECONDS");
  return test::outcome_of(test::spawn_case(name, {}), std::chrono::seconds(limit == nullptr ? 120 : std::atoi(limit)));
}

struct Settings {
  ~Settings() {
    nccl_host_set_kernel_slots(4);
    nccl_host_set_launch_polls(2);
    nccl_host_set_version(0);
    cuda_host::set_hardware_queues(0);
    cuda_host::set_queue_limit(1024);
  }
};

}  // namespace

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("many chunks with few places for kernels" * doctest::skip()) {
  const Settings settings;
  for (const int num_queues : {0, 1, 2}) {
    cuda_host::set_hardware_queues(num_queues);
    for (const auto& ids : {test::node_ids({2}), test::node_ids({2, 2})}) {
      nccl_host_set_kernel_slots(ids.back() == 0 ? 1 : 2);  // one for each communicator
      const int size = static_cast<int>(ids.size());
      run_nccl_ranks(size, [&](int, const NcclOptions& options) {
        const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
        Stream stream;
        const Tensors tensors(size, 8);
        tensors.clear(stream);
        for (int i = 0; i < 5; ++i) {
          tensors.gather(*communicator, stream);
          tensors.scatter(*communicator, stream);
          tensors.all_reduce(*communicator, stream);
        }
        synchronize(stream.view());
      });
    }
  }
}

// Rule: operations on several communicators of a device need the same order on all ranks. If a GPU has no room for a
// kernel of each, ranks that start kernels in different orders wait for each other forever.
TEST_CASE(
    "nccl: ranks whose GPU has a place for each communicator, and one or two hardware queues, do not wait for each "
    "other") {
  CHECK(outcome_of_case("many chunks with few places for kernels") == "ends well");
}

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("a launch queue that is full behind a stuck peer" * doctest::skip()) {
  const Settings settings;
  cuda_host::set_queue_limit(32);
  std::atomic<bool> done = false;
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator({0, 0}, kChunkBytes, options);
    Stream stream;
    const Tensors tensors(2, 64);
    tensors.clear(stream);
    tensors.gather(*communicator, stream);
    synchronize(stream.view());
    if (rank == 1) {
      while (!done) std::this_thread::sleep_for(1ms);
      return;
    }
    const auto use = [&] {
      for (int i = 0; i < 20; ++i) tensors.gather(*communicator, stream, 2s);
    };
    CHECK_THROWS_WITH_AS(use(), doctest::Contains("not done within the timeout, 2000 ms"), TransportError);
    synchronize(stream.view());
    done = true;
  });
}

// Rule: CUDA blocks the host when a launch queue is full. A thread that aborts must not need anything that the blocked
// thread holds.
TEST_CASE("nccl: a full launch queue behind a peer that is stuck ends by the timeout") {
  CHECK(outcome_of_case("a launch queue that is full behind a stuck peer") == "ends well");
}

// Rule: before 2.26.2 a thread's groups on two non-blocking communicators crash, before 2.27.3 aborts can hang.
TEST_CASE("nccl: versions that crash or hang with what is done here are refused") {
  const Settings settings;
  load_nccl();
  for (const int version : {21806, 22203, 22602, 22702}) {
    nccl_host_set_version(version);
    CHECK_THROWS_WITH_AS(nccl::open_library("", ""), doctest::Contains("NCCL: expected 2.27.3 or later, got 2."),
                         TransportError);
  }
  for (const int version : {22703, 22809, 23007}) {
    nccl_host_set_version(version);
    CHECK(nccl::open_library("", "").version == version);
  }
}

namespace {

// Checks the memory of four ranks.
void check_memory(int num_channels) {
  const int communicators_before = nccl_host_live_communicators();
  const long long bytes_before = nccl_host_connection_bytes();
  std::atomic<int> num_ready = 0;
  std::atomic<bool> is_counted = false;
  run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator({0, 0, 0, 0}, kChunkBytes, options);
    Stream stream;
    const Tensors tensors(4, 5);
    tensors.clear(stream);
    tensors.gather(*communicator, stream);
    tensors.scatter(*communicator, stream);
    synchronize(stream.view());
    ++num_ready;
    while (num_ready < 4) std::this_thread::sleep_for(1ms);
    if (rank == 0) {
      CHECK(nccl_host_live_communicators() - communicators_before == 4);
      // Makes an exact all-to-all: each rank, with three peers, in two directions. A ring is one more peer.
      CHECK(nccl_host_connection_bytes() - bytes_before <= 4LL * (3 + 1) * 2 * num_channels * (7 << 20));
      is_counted = true;
    }
    while (!is_counted) std::this_thread::sleep_for(1ms);
  });
}

}  // namespace

// Rule: each communicator allocates buffers for each peer, direction and channel, outside of torch's memory.
TEST_CASE("nccl: a thread's groups are all on one communicator, which takes the memory of one") {
  const NoTraces no_traces;
  const Settings settings;
  nccl_host_set_version(22501);  // notes groups on two
  check_memory(/*num_channels=*/16);
}

// Rule: NCCL connects two ranks at their first group with a message, and waits for both on the host.
TEST_CASE("nccl: the first call of a kind waits for no peer, nor does one that a graph captures") {
  const NoTraces no_traces;
  for (const auto& ids : {test::node_ids({4}), test::node_ids({2, 2})}) {
    std::atomic<int> num_called = 0;
    run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
      const auto communicator = make_cuda_communicator(ids, kChunkBytes, options);
      Stream stream;
      const Tensors tensors(4, 3);
      tensors.clear(stream);
      while (num_called < rank) std::this_thread::sleep_for(1ms);  // one rank after the other
      tensors.gather(*communicator, stream, 20s);
      tensors.scatter(*communicator, stream, 20s);
      tensors.all_reduce(*communicator, stream, 20s);
      ++num_called;
      synchronize(stream.view());
    });
  }
}

// Rule: a store may never answer if the rank that serves it is gone. Deadlines must not depend on it.
// NCCL would start them at the end of that group, behind work that was queued later.
TEST_CASE("nccl: transfers in a group that the caller's thread has open are refused") {
  std::latch both_refused(2);
  run_nccl_ranks(2, [&](int, NcclOptions options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    const nccl::Library& nccl = nccl::library();
    transport->begin("a call", {}, 60s);
    CHECK(nccl.GroupStart() == nccl::Result::success);
    CHECK_THROWS_WITH_AS(transport->all_gather(bytes.bytes(), 32, stream.view()),
                         doctest::Contains("expected no open group on this thread"), TransportError);
    both_refused.arrive_and_wait();
    CHECK(nccl.GroupEnd() == nccl::Result::in_progress);
    CHECK_THROWS_AS(transport->begin("next", {}, 1s), TransportError);
  });
}

TEST_CASE("nccl: a store that does not answer keeps no failure from ending") {
  const NoTraces no_traces;
  std::atomic<bool> done = false;
  std::promise<void> answer;
  const std::shared_future<void> answered = answer.get_future().share();
  run_nccl_ranks(2, [&](int rank, NcclOptions options) {
    if (rank == 0) {
      options.peer_failure = [answered]() -> std::string {
        answered.wait_for(60s);
        return {};
      };
      options.on_failure = [answered](const std::string&) { answered.wait_for(60s); };
    }
    const auto transport = make_nccl_transport(options);
    if (rank == 0) {
      Stream stream;
      DeviceArray<unsigned char> bytes(64);
      bytes.set(std::vector<unsigned char>(64), stream);
      transport->begin("late", {}, 1500ms);
      transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
      const auto start = Clock::now();
      synchronize(stream.view());
      CHECK(Clock::now() - start < 30s);
      CHECK_THROWS_AS(transport->begin("next", {}, 1s), TimeoutError);
      done = true;
    }
    while (!done) std::this_thread::sleep_for(1ms);
  });
  answer.set_value();
  std::this_thread::sleep_for(50ms);
}

// Rule: an abort makes NCCL's kernels leave early. Streams go on, with undefined bytes.
TEST_CASE("nccl: after an abort what was to arrive is anything, and later calls say so") {
  const NoTraces no_traces;
  std::atomic<bool> done = false;
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    if (rank == 0) {
      Stream stream;
      DeviceArray<unsigned char> bytes(64);
      bytes.set(std::vector<unsigned char>(64, 7), stream);
      transport->begin("spoiled", {}, 2s);
      transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
      const auto left = bytes.get(stream);
      CHECK(left[0] == 7);
      CHECK(left[32] == 0xa5);
      CHECK_THROWS_AS(transport->begin("next", {}, 1s), TimeoutError);
      done = true;
    }
    while (!done) std::this_thread::sleep_for(1ms);
  });
}

// Rule: a graph uses the memory that it captured in every launch, even if it was freed.
TEST_CASE("cuda collectives: a graph goes on after its communicator, in memory that is still its own") {
  const std::int64_t written_before = cuda_host::num_bytes_written_after_free();
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    auto communicator = make_cuda_communicator({0, 0}, kChunkBytes, options);
    Stream stream;
    const Tensors tensors(2, 3);
    tensors.clear(stream);
    tensors.gather(*communicator, stream);
    cudaGraphExec_t graph = test::capture(stream, [&] { tensors.gather(*communicator, stream); });
    communicator.reset();
    std::vector<float> values(static_cast<std::size_t>(tensors.elements * 2));
    const auto own = values.begin() + rank * tensors.elements;
    std::fill_n(own, tensors.elements, static_cast<float>(rank + 1));
    tensors.whole.set(values, stream);
    REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
    const auto gathered = tensors.whole.get(stream);
    CHECK(gathered.front() == doctest::Approx(1).epsilon(0.01));
    CHECK(gathered.back() == doctest::Approx(2).epsilon(0.01));
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
  });
  CHECK(cuda_host::num_bytes_written_after_free() == written_before);
  CHECK(std::string(nccl_host_take_misuse()) == "");
}

// Rule: while one thread captures in CUDA's default mode, another thread that allocates, queries, waits or loads a
// kernel breaks the capture.
TEST_CASE("cuda collectives: another thread's capture stays whole while a communicator is made, used and closed") {
  const NoTraces no_traces;
  cuda_host::unload_kernels();
  std::barrier all(3);
  std::thread capturing([&] {
    Stream stream;
    cudaGraph_t graph = nullptr;
    all.arrive_and_wait();
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    all.arrive_and_wait();
    all.arrive_and_wait();
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    static_cast<void>(cudaGraphDestroy(graph));
    all.arrive_and_wait();
  });
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const Stream stream;
    const Tensors tensors(2, 3);
    std::vector<float> values(static_cast<std::size_t>(tensors.elements * 2));
    std::fill_n(values.begin() + rank * tensors.elements, tensors.elements, static_cast<float>(rank + 1));
    tensors.whole.set(values, stream);
    all.arrive_and_wait();
    all.arrive_and_wait();
    CHECK_NOTHROW(tensors.gather(*make_cuda_communicator({0, 0}, kChunkBytes, options), stream));
    all.arrive_and_wait();
    all.arrive_and_wait();
    const auto gathered = tensors.whole.get(stream);
    CHECK(gathered.front() == doctest::Approx(1).epsilon(0.01));
    CHECK(gathered.back() == doctest::Approx(2).epsilon(0.01));
  });
  capturing.join();
}

// Rule: a kernel is loaded at its first launch, which a capture by this thread forbids.
TEST_CASE("cuda: a graph's kernels need not have run before") {
  const NoTraces no_traces;
  const auto workspace = make_cuda_workspace();
  const auto codec = make_cuda_codec(*workspace);
  const Stream stream;
  const DeviceArray<float> from(64), to(64);
  from.set(std::vector<float>(64, 3.0f), stream);
  cuda_host::unload_kernels();
  const Decode job{{from.bytes(), {}, DType::float32}, {to.bytes(), 64, DType::float32}};
  cudaGraphExec_t graph = test::capture(stream, [&] { codec->decode({&job, 1}, stream.view()); });
  REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
  CHECK(to.get(stream) == std::vector<float>(64, 3.0f));
  CHECK(cudaGraphExecDestroy(graph) == cudaSuccess);
}

// Rule: a stream that a capture has joined belongs to the graph until the capture ends. The caller's may be gone by
// then.
TEST_CASE("nccl: a call beside a capture of other calls is refused, and both go on") {
  const NoTraces no_traces;
  run_nccl_ranks(2, [&](int, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator({0, 0}, kChunkBytes, options);
    Stream beside;
    const Tensors tensors(2, 1);
    tensors.clear(beside);
    tensors.gather(*communicator, beside);
    synchronize(beside.view());
    cudaGraphExec_t graph = nullptr;
    {
      Stream captured;
      graph = test::capture(captured, [&] {
        tensors.gather(*communicator, captured);
        CHECK_THROWS_WITH_AS(tensors.gather(*communicator, beside),
                             doctest::Contains("stream: expected one of the CUDA graph"), ArgumentError);
      });
    }
    tensors.gather(*communicator, beside);
    REQUIRE(cudaGraphLaunch(graph, beside) == cudaSuccess);
    synchronize(beside.view());
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
  });
}

// Rule: this variable overrides the communicator's configuration, and a blocking call cannot be aborted.
TEST_CASE("nccl: NCCL_COMM_BLOCKING, which would make an abort impossible, is refused") {
  setenv("NCCL_COMM_BLOCKING", "1", 1);
  NcclOptions options;
  options.unique_id = make_nccl_unique_id();
  CHECK_THROWS_WITH_AS(make_nccl_transport(options),
                       doctest::Contains("NCCL_COMM_BLOCKING: expected it unset or 0, got 1"), TransportError);
  setenv("NCCL_COMM_BLOCKING", "0", 1);
  CHECK_NOTHROW(make_nccl_transport(options));
  unsetenv("NCCL_COMM_BLOCKING");
}

TEST_CASE("nccl: a transport that is destroyed while another device is current makes no context there") {
  const NoTraces no_traces;
  const int before = cuda_host::num_destroyed_elsewhere();
  test::run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    transport->begin("gather", {}, 60s);
    transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
    synchronize(stream.view());
    const CudaDeviceGuard other(1 - rank);
    transport.reset();
  });
  CHECK(cuda_host::num_destroyed_elsewhere() == before);
}

}  // namespace zcomm
