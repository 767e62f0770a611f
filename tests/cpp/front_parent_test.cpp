// Tests of the front's second communicator: how ranks meet, that all of them stay exact if one cannot, and what a
// program sees of its failures.
#include <barrier>

#include "front_ranks.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::Comm;
using test::count_of;
using test::require_nccl;
using test::Result;
using test::Stream;

constexpr std::size_t kCount = 3000;

Result sum(Comm comm, const test::DeviceArray<float>& values, const Stream& stream) {
  return nccl::ncclAllReduce(values.data(), values.data(), kCount, test::kFloat32, test::kSum, comm, stream);
}

Result state_of(Comm comm) {
  Result state = Result::success;
  require_nccl(nccl::ncclCommGetAsyncError(comm, &state));
  return state;
}

// Runs the process case below as two ranks with different variables. Returns their counts.
std::string stats_of_two(std::vector<std::string> of_first, std::vector<std::string> of_second) {
  const std::string file = "/tmp/zcomm-front-two-" + std::to_string(getpid()) + ".json";
  std::filesystem::remove(file);
  const std::string id = test::to_hex(make_nccl_unique_id());
  std::vector<pid_t> ranks;
  for (auto* variables : {&of_first, &of_second}) {
    for (const char* each : {"ZCOMM_ALL_REDUCE=int4:128", "ZCOMM_NODE_SIZE=1"}) variables->push_back(each);
    variables->push_back("ZCOMM_STATS=" + file);
    variables->push_back("NCCL_TEST_ID=" + id);
    variables->push_back("NCCL_TEST_RANK=" + std::to_string(ranks.size()));
    ranks.push_back(test::spawn_case("front process: one of two ranks", *variables));
  }
  for (const pid_t rank : ranks) CHECK(test::outcome_of(rank) == "ends well");
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  std::filesystem::remove(file);
  return text.str();
}

}  // namespace

TEST_CASE("front process: one of two ranks" * doctest::skip()) {
  const int rank = std::atoi(std::getenv("NCCL_TEST_RANK"));
  test::require_cuda(cudaSetDevice(rank));
  test::NoTraces no_traces;
  const test::ProgramComm comm(test::id_from_hex(std::getenv("NCCL_TEST_ID")), rank, 2, true);
  const Stream stream;
  const test::DeviceArray<float> values(kCount);
  for (int turn = 0; turn < 3; ++turn) {
    values.set(std::vector<float>(kCount, static_cast<float>(rank + 1)), stream);
    require_nccl(sum(comm, values, stream));
    for (const float value : values.get(stream)) {
      if (std::abs(value - 3.0f) > 0.1f) throw Error("wrong: " + std::to_string(value));
    }
  }
}

TEST_CASE("front: if one rank cannot connect, all ranks stay exact") {
  CHECK(count_of(stats_of_two({"ZCOMM_MIN_BYTES=0"}, {"ZCOMM_MIN_BYTES=0"}), "\"compressed\": 3}") == 2);
  // Found before they connect.
  CHECK(count_of(stats_of_two({"ZCOMM_MIN_BYTES=0", "NCCL_COMM_BLOCKING=1"}, {"ZCOMM_MIN_BYTES=0"}),
                 "{\"no_meeting\": 3}") == 2);
  // Found while they connect.
  CHECK(count_of(stats_of_two({"ZCOMM_MIN_BYTES=0"}, {"ZCOMM_MIN_BYTES=1"}), "{\"no_meeting\": 3}") == 2);
}

TEST_CASE("front process: its communicator fails" * doctest::skip()) {
  constexpr int kRemoteError = 6;
  test::NoTraces no_traces;
  const NcclUniqueId id = test::new_id();
  std::barrier all_have_called(4);
  test::run_ranks(4, [&](int rank) {
    const CudaDeviceGuard device(rank);
    test::ProgramComm comm(id, rank, 4, true);
    const Stream stream;
    const test::DeviceArray<float> values(kCount);
    require_nccl(sum(comm, values, stream));
    test::require_cuda(cudaStreamSynchronize(stream));
    CHECK(state_of(comm) == Result::success);
    all_have_called.arrive_and_wait();  // it fails on all ranks that are the second of a node
    if (rank == 1) nccl_host_fail_rank(/*is_of_split=*/true, rank, kRemoteError);
    if (rank == 1) {
      const auto latest = std::chrono::steady_clock::now() + 30s;
      Result called = Result::success;
      while (called == Result::success && std::chrono::steady_clock::now() < latest) called = sum(comm, values, stream);
      CHECK(called == Result::remote_error);
      CHECK(state_of(comm) == Result::remote_error);
      CHECK(sum(comm, values, stream) == Result::remote_error);
    }
    comm.abort();
  });
}

TEST_CASE("front: a failure of the second communicator is the program's to see, and it can abort") {
  const std::vector<std::string> variables{"ZCOMM_ALL_REDUCE=int4:128", "ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0"};
  CHECK(count_of(test::stats_of("front process: its communicator fails", variables), "\"compressed\": ") == 4);
}

TEST_CASE("front process: an abort ends what waits for a rank" * doctest::skip()) {
  const bool has_met = std::getenv("TESTS_HAS_MET") != nullptr;
  const NcclUniqueId id = test::new_id();
  test::run_ranks(4, [&](int rank) {
    const CudaDeviceGuard device(rank);
    test::ProgramComm comm(id, rank, 4, /*blocks=*/false);
    const Stream stream;
    const test::DeviceArray<float> values(kCount);
    if (has_met) require_nccl(sum(comm, values, stream));
    if (has_met) test::require_cuda(cudaStreamSynchronize(stream));
    if (rank == 3) return comm.abort();  // and never comes
    const Comm handle = comm;
    std::thread aborter;
    if (!has_met) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(100ms);
        comm.abort();
      });
    }
    const Result called = sum(handle, values, stream);
    if (aborter.joinable()) aborter.join();
    CHECK(called == (has_met ? Result::success : Result::remote_error));
    if (has_met) comm.abort();
    test::require_cuda(cudaStreamSynchronize(stream));
  });
  CHECK(nccl_host_live_communicators() == 0);
}

TEST_CASE("front: an abort ends a meeting, and a call that waits for a rank") {
  const std::vector<std::string> variables{"ZCOMM_ALL_REDUCE=int4:128", "ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=0"};
  auto met = variables;
  met.push_back("TESTS_HAS_MET=1");
  constexpr const char* kProcess = "front process: an abort ends what waits for a rank";
  CHECK(count_of(test::stats_of(kProcess, met), "\"compressed\": ") == 4);
  CHECK(test::stats_of(kProcess, variables) == "");
}

}  // namespace zcomm
