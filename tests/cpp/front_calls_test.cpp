// Tests of the front's calls and groups: compressed results have the bits of zcomm's own communicator, exact ones those
// of NCCL. A case that calls NCCL is skipped by default: another one runs it in a process with its variables.
#include "front_cases.hpp"

namespace zcomm {
namespace {

using front::Collective;
using test::Buffers;
using test::Bytes;
using test::Case;
using test::Comm;
using test::compressed;
using test::count_of;
using test::input_of;
using test::require_cuda;
using test::require_nccl;
using test::Result;
using test::Stream;

constexpr int kSize = 4;
const std::vector<std::string> kAsked{"ZCOMM_ALL_GATHER=int8:256",
                                      "ZCOMM_REDUCE_SCATTER=int8:128/int4:128",
                                      "ZCOMM_ALL_REDUCE=int8:128/int4:128",
                                      "ZCOMM_EXCHANGES=int8:128/int4:128",
                                      "ZCOMM_NODE_SIZE=2",
                                      "ZCOMM_MIN_BYTES=4096"};

// Runs a call on all ranks and compares.
void check_result(const Case& the_case, int rank, Comm comm, const Stream& stream, const Bytes& right) {
  const Buffers buffers(the_case, rank, stream);
  require_nccl(buffers.call(comm, stream));
  if (buffers.result(stream) != right) throw Error("rank " + std::to_string(rank) + ": wrong result");
}

}  // namespace

TEST_CASE("front process: all collectives and types" * doctest::skip()) {
  std::vector<Case> cases;
  for (const Collective kind :
       {Collective::all_gather, Collective::reduce_scatter, Collective::all_reduce, Collective::all_to_all,
        Collective::broadcast, Collective::gather, Collective::scatter}) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      for (const bool in_place : {false, true}) {
        cases.push_back({kind, 3000, dtype, test::kSum, in_place});
        const bool reduces = kind == Collective::reduce_scatter || kind == Collective::all_reduce;
        if (reduces) cases.push_back({kind, 3000, dtype, test::kAverage, in_place});
      }
    }
  }
  std::vector<std::vector<Bytes>> right;
  for (const Case& each : cases) right.push_back(compressed(each));
  const bool blocks = std::getenv("TESTS_NON_BLOCKING") == nullptr;
  test::NoTraces no_traces;
  test::run_program(
      kSize,
      [&](int rank, Comm comm, const Stream& stream) {
        for (std::size_t i = 0; i < cases.size(); ++i) {
          check_result(cases[i], rank, comm, stream, right[i][static_cast<std::size_t>(rank)]);
          if (!blocks) test::settle(comm);
        }
      },
      blocks);
}

TEST_CASE("front: compressed calls have the bits of zcomm's communicator") {
  for (const char* mode : {"TESTS_BLOCKING=1", "TESTS_NON_BLOCKING=1"}) {
    auto variables = kAsked;
    variables.push_back(mode);
    const std::string stats = test::stats_of("front process: all collectives and types", variables);
    CHECK(count_of(stats, "\"all_gather\": {\"calls\": {\"compressed\": 6}") == kSize);
    CHECK(count_of(stats, "\"reduce_scatter\": {\"calls\": {\"compressed\": 12}") == kSize);
    CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 12}") == kSize);
    for (const char* exchange : {"all_to_all", "broadcast", "gather", "scatter"}) {
      CHECK(count_of(stats, "\"" + std::string(exchange) + "\": {\"calls\": {\"compressed\": 6}") == kSize);
    }
    CHECK(count_of(stats, "\"nodes\": 2") == kSize);
  }
}

// Only the root has both buffers.
TEST_CASE("front process: roots" * doctest::skip()) {
  const Case broadcast{Collective::broadcast, 3000}, gather{Collective::gather, 3000},
      scatter{Collective::scatter, 3000};
  const auto right_of_broadcast = compressed(broadcast), right_of_gather = compressed(gather);
  const auto right_of_scatter = compressed(scatter);
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const auto r = static_cast<std::size_t>(rank);
    const bool is_root = rank == broadcast.root;
    const test::DeviceArray<std::uint8_t> own(12000), all(48000);
    own.set(input_of(broadcast, rank), stream);
    require_nccl(nccl::ncclBcast(own.data(), 3000, test::kFloat32, broadcast.root, comm, stream));
    CHECK(own.get(stream) == right_of_broadcast[r]);
    own.set(input_of(gather, rank), stream);
    require_nccl(
        nccl::ncclGather(own.data(), is_root ? all.data() : nullptr, 3000, test::kFloat32, gather.root, comm, stream));
    if (is_root) CHECK(all.get(stream) == right_of_gather[r]);
    all.set(input_of(scatter, rank), stream);
    require_nccl(nccl::ncclScatter(is_root ? all.data() : nullptr, own.data(), 3000, test::kFloat32, scatter.root, comm,
                                   stream));
    CHECK(own.get(stream) == right_of_scatter[r]);
    CHECK(nccl::ncclBcast(own.data(), 3000, test::kFloat32, kSize, comm, stream) == Result::invalid_argument);
  });
}

TEST_CASE("front: ranks that are not the root need one buffer, and NCCL answers a wrong root") {
  const std::string stats = test::stats_of("front process: roots", kAsked);
  CHECK(count_of(stats, "\"broadcast\": {\"calls\": {\"compressed\": 1, \"format\": 1}") == kSize);
  CHECK(count_of(stats, "\"gather\": {\"calls\": {\"compressed\": 1}") == kSize);
  CHECK(count_of(stats, "\"scatter\": {\"calls\": {\"compressed\": 1}") == kSize);
}

TEST_CASE("front process: calls that stay exact" * doctest::skip()) {
  test::NoTraces no_traces;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    constexpr std::size_t kCount = 2048;
    const auto value = [](int r, std::size_t i) { return (r + 1) * (static_cast<int>(i % 100) + 1); };
    std::vector<int> integers(kCount);
    std::vector<float> floats(kCount);
    for (std::size_t i = 0; i < kCount; ++i) floats[i] = static_cast<float>(integers[i] = value(rank, i));
    const test::DeviceArray<int> integer_array(kCount);
    const test::DeviceArray<float> float_array(kCount);
    integer_array.set(integers, stream);
    float_array.set(floats, stream);
    require_nccl(nccl::ncclAllReduce(integer_array.data(), integer_array.data(), kCount, test::kInt32, test::kSum, comm,
                                     stream));
    require_nccl(
        nccl::ncclAllReduce(float_array.data(), float_array.data(), kCount, test::kFloat32, test::kMax, comm, stream));
    const auto sums = integer_array.get(stream);
    const auto largest = float_array.get(stream);
    float_array.set(floats, stream);
    require_nccl(nccl::ncclAllReduce(float_array.data(), float_array.data(), 1000, test::kFloat32, test::kSum, comm,
                                     stream));  // small
    const auto small = float_array.get(stream);
    const Result in_place =
        nccl::ncclAlltoAll(float_array.data(), float_array.data(), kCount / kSize, test::kFloat32, comm, stream);
    if (in_place != Result::invalid_argument) throw Error("NCCL did not answer an all-to-all in place");
    for (std::size_t i = 0; i < kCount; ++i) {
      const bool is_right = sums[i] == 10 * value(0, i) && largest[i] == static_cast<float>(value(3, i)) &&
                            small[i] == static_cast<float>(i < 1000 ? 10 * value(0, i) : value(rank, i));
      if (!is_right) throw Error("wrong at " + std::to_string(i));
    }
  });
  CHECK(cuda_host::counts().streams == no_traces.before.streams);
}

TEST_CASE("front: what cannot be compressed is exact, and counted by reason") {
  const std::string stats = test::stats_of("front process: calls that stay exact", kAsked);
  CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"dtype\": 1, \"operation\": 1, \"min_bytes\": 1}") == kSize);
  CHECK(count_of(stats, "\"all_to_all\": {\"calls\": {\"in_place\": 1}") == kSize);
  CHECK(test::stats_of("front process: calls that stay exact", {"ZCOMM_NODE_SIZE=2"}) == "");
}

TEST_CASE("front process: calls of a program that gets nothing compressed" * doctest::skip()) {
  const Case the_case{Collective::all_reduce, 3000, DType::float32, test::kSum, true};
  const std::vector<Bytes> right = test::exact(the_case);
  test::NoTraces no_traces;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    for (int i = 0; i < 3; ++i) check_result(the_case, rank, comm, stream, right[static_cast<std::size_t>(rank)]);
    CHECK(nccl_host_live_communicators() <= kSize);
  });
}

TEST_CASE(
    "front: a program that asks for nothing, or has one node, gets NCCL's results and no communicator of zcomm's") {
  constexpr const char* kProcess = "front process: calls of a program that gets nothing compressed";
  const test::Written of_none = test::written_by(kProcess, {});
  CHECK((of_none.stats.empty() && of_none.errors.empty()));
  const test::Written of_one_node = test::written_by(kProcess, {"ZCOMM_ALL_REDUCE=int8:128", "ZCOMM_MIN_BYTES=0"});
  CHECK(count_of(of_one_node.stats, "\"nodes\": 1, ") == kSize);
  CHECK(count_of(of_one_node.stats, "\"all_reduce\": {\"calls\": {\"one_node\": 3}") == kSize);
  CHECK(of_one_node.errors == "zcomm's front of NCCL compressed no call: ZCOMM_LOG=info shows the reasons\n");
  // A wrong variable leaves all calls exact.
  const test::Written of_wrong = test::written_by(kProcess, {"ZCOMM_ALL_REDUCE=int9:128", "ZCOMM_NODE_SIZE=2"});
  CHECK(of_wrong.stats.empty());
  CHECK(count_of(of_wrong.errors, "zcomm's front of NCCL leaves every call exact: ZCOMM_ALL_REDUCE: format: ") == 1);
}

TEST_CASE("front process: mixed groups" * doctest::skip()) {
  const Case large{Collective::all_reduce, 3000};
  const Case gather{Collective::all_gather, 2000};
  const Case small{Collective::all_reduce, 100, DType::float32, test::kMax};
  const auto right = compressed(large);
  const auto right_of_gather = compressed(gather);
  const NcclUniqueId second = test::new_id();
  const bool blocks = std::getenv("TESTS_NON_BLOCKING") == nullptr;
  test::NoTraces no_traces;
  test::run_program(
      kSize,
      [&](int rank, Comm comm, const Stream& stream) {
        const auto r = static_cast<std::size_t>(rank);
        const test::ProgramComm other(second, rank, kSize, blocks);
        const Stream other_stream;
        for (int turn = 0; turn < 4; ++turn) {
          const Buffers a(large, rank, stream), b(gather, rank, stream), c(small, rank, stream);
          // On one stream, an order that differs between ranks would let them wait for each other.
          const Stream& stream_of_d = turn % 2 == 0 ? stream : other_stream;
          const Buffers d(large, rank, stream_of_d);
          require_nccl(nccl::ncclGroupStart());
          // Ranks need not have the communicators of a group in the same order.
          if (rank % 2 == 0) require_nccl(a.call(comm, stream));
          require_nccl(d.call(other, stream_of_d));
          require_nccl(nccl::ncclGroupStart());
          if (rank % 2 != 0) require_nccl(a.call(comm, stream));
          require_nccl(c.call(comm, stream));
          require_nccl(nccl::ncclGroupEnd());
          require_nccl(b.call(comm, stream));
          const Result result = nccl::ncclGroupEnd();
          if (result != Result::in_progress) require_nccl(result);
          test::settle(comm);
          test::settle(other);
          const bool is_right = a.result(stream) == right[r] && b.result(stream) == right_of_gather[r] &&
                                d.result(stream_of_d) == right[r];
          if (!is_right) throw Error("rank " + std::to_string(rank) + ": wrong result");
        }
      },
      blocks);
}

TEST_CASE("front: groups of exact and compressed calls, nested, on several communicators") {
  for (const char* mode : {"TESTS_BLOCKING=1", "TESTS_NON_BLOCKING=1"}) {
    auto variables = kAsked;
    variables.push_back(mode);
    const std::string stats = test::stats_of("front process: mixed groups", variables);
    CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 4, \"operation\": 4}") == kSize);
    CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 4}") == kSize);
  }
}

TEST_CASE("front process: one thread has all ranks" * doctest::skip()) {
  const NcclUniqueId id = test::new_id();
  test::NoTraces no_traces;
  std::vector<std::unique_ptr<test::ProgramComm>> comms(kSize);
  test::run_ranks(kSize, [&](int rank) {
    const CudaDeviceGuard device(rank);
    comms[static_cast<std::size_t>(rank)] = std::make_unique<test::ProgramComm>(id, rank, kSize, true);
  });
  for (const Collective kind :
       {Collective::all_reduce, Collective::all_reduce, Collective::broadcast, Collective::all_to_all}) {
    const Case the_case{kind, 3000};
    const auto right = compressed(the_case);
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Buffers>> buffers;
    for (int rank = 0; rank < kSize; ++rank) {
      const CudaDeviceGuard device(rank);
      streams.push_back(std::make_unique<Stream>());
      buffers.push_back(std::make_unique<Buffers>(the_case, rank, *streams.back()));
    }
    require_nccl(nccl::ncclGroupStart());
    for (std::size_t r = 0; r < kSize; ++r) require_nccl(buffers[r]->call(*comms[r], *streams[r]));
    require_nccl(nccl::ncclGroupEnd());
    for (std::size_t r = 0; r < kSize; ++r) CHECK(buffers[r]->result(*streams[r]) == right[r]);
  }
}

TEST_CASE("front: one thread may have several ranks, in a group") {
  const std::string stats = test::stats_of("front process: one thread has all ranks", kAsked);
  CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 2}") == kSize);
  CHECK(count_of(stats, "\"all_to_all\": {\"calls\": {\"compressed\": 1}") == kSize);
}

TEST_CASE("front process: captures" * doctest::skip()) {
  const Case the_case{Collective::all_reduce, 3000};
  const auto right = compressed(the_case);
  test::NoTraces no_traces;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const Bytes& wanted = right[static_cast<std::size_t>(rank)];
    const Buffers first(the_case, rank, stream), second(the_case, rank, stream);
    require_cuda(cudaStreamSynchronize(stream));
    // The stand-in connects a communicator's collectives only outside captures, as an exact call does.
    const Case max{Collective::all_reduce, 3000, DType::float32, test::kMax};
    const Buffers warm(max, rank, stream);
    require_nccl(warm.call(comm, stream));
    const cudaGraphExec_t exact = test::capture(stream, [&] { require_nccl(first.call(comm, stream)); });
    require_cuda(cudaGraphLaunch(exact, stream));
    if (first.result(stream) == wanted) throw Error("the first call was compressed in a capture");
    check_result(the_case, rank, comm, stream, wanted);
    const cudaGraphExec_t graph = test::capture(stream, [&] { require_nccl(second.call(comm, stream)); });
    for (int turn = 0; turn < 2; ++turn) require_cuda(cudaGraphLaunch(graph, stream));
    if (second.result(stream) != wanted) throw Error("a replay is wrong");
    const Stream other;
    const Buffers third(the_case, rank, other);
    require_cuda(cudaStreamSynchronize(other));
    const cudaGraphExec_t elsewhere = test::capture(other, [&] { require_nccl(third.call(comm, other)); });
    require_cuda(cudaGraphLaunch(elsewhere, other));
    if (third.result(other) == wanted) throw Error("a call was compressed in a capture of another stream");
    require_cuda(cudaGraphExecDestroy(elsewhere));
    require_cuda(cudaGraphExecDestroy(exact));
    require_cuda(cudaGraphExecDestroy(graph));
  });
}

TEST_CASE("front: a capture compresses what was called before on its stream") {
  const std::string stats = test::stats_of("front process: captures", kAsked);
  CHECK(count_of(stats, "\"all_reduce\": {\"calls\": {\"compressed\": 2, \"operation\": 1, \"capture\": 2}") == kSize);
}

}  // namespace zcomm
