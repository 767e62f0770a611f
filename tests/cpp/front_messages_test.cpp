// Tests of the front's messages: each has the bits of its own encoding. A group waits only for what NCCL would wait
// for. A case that calls NCCL is skipped by default: another one runs it in a process with its variables.
#include <deque>

#include "front_cases.hpp"

namespace zcomm {
namespace {

using front::Collective;
using test::Bytes;
using test::Case;
using test::Comm;
using test::count_of;
using test::require_cuda;
using test::require_nccl;
using test::Result;
using test::Stream;

constexpr int kSize = 4;
const std::vector<std::string> kAsked{"ZCOMM_EXCHANGES=int8:128/int4:128", "ZCOMM_NODE_SIZE=2", "ZCOMM_MIN_BYTES=4096"};

// Message of one rank to another.
struct Sent {
  int from, to;
  std::size_t count;
  DType dtype = DType::float32;
  bool is_float = true;  // false: it is of integers as large

  unsigned type() const { return !is_float ? test::kInt32 : Case{Collective::message, count, dtype}.type(); }
  std::size_t num_bytes() const { return count * element_size(dtype); }
};

Bytes values_of(const Sent& sent) {
  return test::input_of({Collective::message, sent.count, sent.dtype}, sent.from, static_cast<unsigned>(sent.count));
}

// Returns what the receiver gets if nodes have so many ranks; 0: nothing is compressed.
Bytes right_of(const Sent& sent, int node_size) {
  Bytes values = values_of(sent);
  const bool is_small = sent.num_bytes() < 4096;
  if (node_size == 0 || sent.from == sent.to || !sent.is_float || is_small) return values;
  const bool is_inside = sent.from / node_size == sent.to / node_size;
  const BlockFormat format = test::kFormats.on(is_inside ? Link::intra_node : Link::inter_node);
  const TensorView view{reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(sent.count), sent.dtype};
  test::make_communicators({0})[0]->round_trip(view, format, view);
  return values;
}

// Buffers of one rank's part in a group of messages.
class Part {
 public:
  Part(std::vector<Sent> all, int rank, const Stream& stream, int node_size = 2)
      : all_(std::move(all)), rank_(rank), node_size_(node_size), stream_(stream) {
    for (const Sent& each : all_) {
      sent_.emplace_back(each.num_bytes());
      received_.emplace_back(each.num_bytes());
      sent_.back().set(values_of(each), stream);
    }
  }
  void post(std::size_t i, Comm comm) const {
    const Sent& each = all_[i];
    if (each.from == rank_) {
      require_nccl(nccl::ncclSend(sent_[i].data(), each.count, each.type(), each.to, comm, stream_));
    }
    if (each.to == rank_) {
      require_nccl(nccl::ncclRecv(received_[i].data(), each.count, each.type(), each.from, comm, stream_));
    }
  }
  void post_all(Comm comm) const {
    for (std::size_t i = 0; i < all_.size(); ++i) post(i, comm);
  }
  void check() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].to != rank_ || received_[i].get(stream_) == right_of(all_[i], node_size_)) continue;
      throw Error(concat("rank ", rank_, ": message ", i, " is wrong"));
    }
  }

 private:
  const std::vector<Sent> all_;
  const int rank_, node_size_;
  const Stream& stream_;
  std::deque<test::DeviceArray<std::uint8_t>> sent_, received_;
};

Result end_group(Comm comm) {
  const Result result = nccl::ncclGroupEnd();
  if (result != Result::in_progress) require_nccl(result);
  test::settle(comm);
  return result;
}

}  // namespace

// As torch makes an all-to-all of them: other lengths for each pair, own ones, and small ones among them.
TEST_CASE("front process: groups of messages" * doctest::skip()) {
  std::vector<Sent> all;
  for (int from = 0; from < kSize; ++from) {
    for (int to = 0; to < kSize; ++to) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
        const auto count = static_cast<std::size_t>(900 * (1 + from + 2 * to));
        all.push_back({from, to, count, dtype});
        all.push_back({from, to, count + 1, dtype});  // a second one to the same rank
      }
      all.push_back({from, to, 3000, DType::float32, /*is_float=*/false});
    }
  }
  const bool blocks = std::getenv("TESTS_NON_BLOCKING") == nullptr;
  test::NoTraces no_traces;
  test::run_program(
      kSize,
      [&](int rank, Comm comm, const Stream& stream) {
        for (int turn = 0; turn < 2; ++turn) {
          const Part part(all, rank, stream);
          require_nccl(nccl::ncclGroupStart());
          part.post_all(comm);
          end_group(comm);
          part.check();
        }
      },
      blocks);
}

TEST_CASE("front: messages in a group have the bits of their encodings") {
  for (const char* mode : {"TESTS_BLOCKING=1", "TESTS_NON_BLOCKING=1"}) {
    auto variables = kAsked;
    variables.push_back(mode);
    const std::string stats = test::stats_of("front process: groups of messages", variables);
    CHECK(count_of(stats, "\"message\": {\"calls\": {\"compressed\": ") == kSize);
    CHECK(count_of(stats, "\"dtype\": 16") == kSize);
  }
  CHECK(test::stats_of("front process: a circle", {}) == "");
}

TEST_CASE("front process: calls alone" * doctest::skip()) {
  test::NoTraces no_traces;
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const Stream other;
    const Part first({{0, 2, 5000}}, rank, stream), second({{2, 0, 4000}, {0, 2, 7000}}, rank, other);
    first.post_all(comm);
    second.post_all(comm);
    require_nccl(nccl::ncclGroupStart());
    const Part third({{0, 2, 6000}}, rank, stream), fourth({{2, 0, 6000}}, rank, other);  // of two streams
    third.post_all(comm);
    fourth.post_all(comm);
    require_nccl(nccl::ncclGroupEnd());
    for (const Part* part : {&first, &second, &third, &fourth}) part->check();
    if (rank == 0) CHECK(nccl::ncclSend(nullptr, 3000, test::kFloat32, 2, comm, stream) == Result::invalid_argument);
    if (rank == 0) CHECK(nccl::ncclSend(&rank, 3000, test::kFloat32, 9, comm, stream) == Result::invalid_argument);
  });
}

// A wrong message in a group: NCCL launches nothing of the group. The next message is the first that its receiver gets.
TEST_CASE("front process: a refused group" * doctest::skip()) {
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const Part part({{0, 2, 5000}}, rank, stream);
    if (rank == 0) {
      const test::DeviceArray<float> values(5001);
      const auto* const misaligned = reinterpret_cast<const std::byte*>(values.data()) + 1;
      require_nccl(nccl::ncclGroupStart());
      require_nccl(nccl::ncclSend(values.data(), 5000, test::kFloat32, 2, comm, stream));
      CHECK(nccl::ncclSend(misaligned, 5000, test::kFloat32, 3, comm, stream) == Result::invalid_argument);
      CHECK(nccl::ncclGroupEnd() == Result::invalid_argument);
    }
    part.post_all(comm);
    part.check();
  });
}

TEST_CASE("front: a group with a message that cannot be encoded is refused as a whole") {
  CHECK(count_of(test::stats_of("front process: a refused group", kAsked), "\"message\"") == 2);
}

TEST_CASE("front: messages need no group, and other ranks no part in them") {
  const std::string stats = test::stats_of("front process: calls alone", kAsked);
  CHECK(count_of(stats, "\"message\": {\"calls\": {\"compressed\": 5") == 1);
  CHECK(count_of(stats, "\"message\": {\"calls\": {\"compressed\": 6") == 1);  // and the one that is refused
  CHECK(count_of(stats, "\"message\"") == 2);
}

// NCCL ends a message of a group although another one's peer has not come yet.
TEST_CASE("front process: a circle" * doctest::skip()) {
  const bool is_asked = std::getenv("ZCOMM_EXCHANGES") != nullptr;
  test::run_program(3, [&](int rank, Comm comm, const Stream& stream) {
    const Part part({{0, 2, 8000}, {0, 1, 100}, {2, 1, 9000}}, rank, stream, is_asked ? 1 : 0);
    if (rank == 1) {
      part.post(2, comm);
      part.post(1, comm);
    } else {
      require_nccl(nccl::ncclGroupStart());
      part.post(0, comm);
      if (rank == 0) part.post(1, comm);
      require_nccl(nccl::ncclGroupEnd());
      if (rank == 2) part.post(2, comm);
    }
    part.check();
    require_cuda(cudaStreamSynchronize(stream));
  });
}

TEST_CASE("front: a message waits only for its own peer") {
  const auto asked = {std::string("ZCOMM_EXCHANGES=int8:128/int4:128"), std::string("ZCOMM_NODE_SIZE=1"),
                      std::string("ZCOMM_MIN_BYTES=4096")};
  CHECK(count_of(test::stats_of("front process: a circle", asked), "\"compressed\": ") == 3);
}

TEST_CASE("front process: captured messages" * doctest::skip()) {
  test::run_program(kSize, [&](int rank, Comm comm, const Stream& stream) {
    const std::vector<Sent> all{{0, 2, 5000}};
    const Part part(all, rank, stream);
    part.post_all(comm);
    part.check();
    const test::DeviceArray<std::uint8_t> values(all[0].num_bytes());
    values.set(values_of(all[0]), stream);
    require_cuda(cudaStreamSynchronize(stream));
    if (rank % 2 != 0) return;
    const cudaGraphExec_t graph = test::capture(stream, [&] {
      if (rank == 0) require_nccl(nccl::ncclSend(values.data(), 5000, test::kFloat32, 2, comm, stream));
      if (rank == 2) require_nccl(nccl::ncclRecv(values.data(), 5000, test::kFloat32, 0, comm, stream));
    });
    for (int turn = 0; turn < 2; ++turn) require_cuda(cudaGraphLaunch(graph, stream));
    if (values.get(stream) != values_of(all[0])) throw Error("a replay is wrong");
    require_cuda(cudaGraphExecDestroy(graph));
  });
}

TEST_CASE("front: messages in captures stay exact") {
  const std::string stats = test::stats_of("front process: captured messages", kAsked);
  CHECK(count_of(stats, "\"message\": {\"calls\": {\"compressed\": 1, \"capture\": 1}") == 2);
}

// One thread makes communicators in a group, and others that are split off.
TEST_CASE("front process: communicators of a group" * doctest::skip()) {
  const NcclUniqueId id = test::new_id();
  test::NoTraces no_traces;
  std::vector<Comm> made(kSize), children(kSize);
  const auto in_group = [&](auto&& make) {
    nccl::Config config = nccl::config_of(22809);
    config.blocking = 0;
    require_nccl(nccl::ncclGroupStart());
    for (int rank = 0; rank < kSize; ++rank) {
      const CudaDeviceGuard device(rank);
      if (const Result result = make(rank, config); result != Result::in_progress) require_nccl(result);
    }
    if (const Result result = nccl::ncclGroupEnd(); result != Result::in_progress) require_nccl(result);
  };
  in_group([&](int rank, nccl::Config& config) {
    config.comm_name = "of a group";
    return nccl::ncclCommInitRankConfig(&made[static_cast<std::size_t>(rank)], kSize, id, rank, &config);
  });
  for (const Comm comm : made) test::settle(comm);
  in_group([&](int rank, nccl::Config& config) {
    const auto r = static_cast<std::size_t>(rank);
    return nccl::ncclCommSplit(made[r], 0, rank, &children[r], &config);
  });
  for (const Comm comm : made) test::settle(comm);
  const std::vector<Sent> all{{0, 3, 5000}, {3, 0, 6000}, {1, 0, 3000}};
  for (const auto* const comms : {&made, &children}) {
    test::run_ranks(kSize, [&](int rank) {  // the stand-in connects two ranks on two threads
      const CudaDeviceGuard device(rank);
      const Stream stream;
      const Part part(all, rank, stream);
      require_nccl(nccl::ncclGroupStart());
      part.post_all((*comms)[static_cast<std::size_t>(rank)]);
      end_group((*comms)[static_cast<std::size_t>(rank)]);
      part.check();
      require_cuda(cudaStreamSynchronize(stream));
    });
    std::deque<Stream> streams;
    std::deque<Part> parts;
    require_nccl(nccl::ncclGroupStart());
    for (int rank = 0; rank < kSize; ++rank) {
      const CudaDeviceGuard device(rank);
      parts.emplace_back(all, rank, streams.emplace_back());
      parts.back().post_all((*comms)[static_cast<std::size_t>(rank)]);
    }
    end_group(comms->front());
    for (const Part& part : parts) part.check();
    for (const Stream& stream : streams) require_cuda(cudaStreamSynchronize(stream));
  }
  for (const auto* const comms : {&children, &made}) {
    for (const Comm comm : *comms) require_nccl(nccl::ncclCommDestroy(comm));
  }
}

TEST_CASE("front: messages of communicators that one thread makes in a group, and splits; children inherit the name") {
  const std::string file = "/tmp/zcomm-front-messages-" + std::to_string(getpid());
  std::ofstream(file) << "message name=of* bytes=4096- int8:128/int4:128\n";
  const auto asked = {"ZCOMM_RULES=" + file, std::string("ZCOMM_NODE_SIZE=2"), std::string("ZCOMM_MIN_BYTES=0")};
  const std::string stats = test::stats_of("front process: communicators of a group", asked);
  std::filesystem::remove(file);
  CHECK(count_of(stats, "\"name\": \"of a group\", \"collectives\": {\"message\": {\"calls\": {\"compressed\": 6}") ==
        2);
  CHECK(count_of(stats, "\"name\": \"of a group\", \"collectives\": {\"message\": {\"calls\": {\"compressed\": 4}") ==
        2);
  CHECK(count_of(stats, "\"name\": \"of a group\", \"collectives\": {\"message\": {\"calls\": {\"compressed\": 2}") ==
        2);
}

TEST_CASE("front process: a rank that makes a communicator" * doctest::skip()) {
  const int rank = std::atoi(std::getenv("NCCL_TEST_RANK"));
  require_cuda(cudaSetDevice(rank));
  nccl::Config config = nccl::config_of(22809);
  config.blocking = 1;
  config.comm_name = rank == 0 ? "first" : "second";
  Comm comm = nullptr;
  const bool is_refused = std::getenv("TESTS_REFUSED") != nullptr;
  CHECK(nccl::ncclCommInitRankConfig(&comm, 2, test::id_from_hex(std::getenv("NCCL_TEST_ID")), rank, &config) ==
        (is_refused ? Result::invalid_argument : Result::success));
  require_nccl(nccl::ncclCommDestroy(comm));
}

TEST_CASE("front: ranks with other settings get an error when their communicator is made; names may differ") {
  const std::string file = "/tmp/zcomm-front-names-" + std::to_string(getpid());
  std::ofstream(file) << "message name=first int8:128";
  const std::string rules = "ZCOMM_RULES=" + file, int8 = "ZCOMM_EXCHANGES=int8:128", fp8 = "ZCOMM_EXCHANGES=fp8:128";
  const auto make = [](const std::string& of_first, const std::string& of_second, const std::string& end) {
    const std::string id = "NCCL_TEST_ID=" + test::to_hex(make_nccl_unique_id());
    const auto spawn = [&](const std::string& setting, const std::string& rank) {
      return test::spawn_case("front process: a rank that makes a communicator",
                              {setting, id, end + "=1", "NCCL_TEST_RANK=" + rank});
    };
    for (const pid_t rank : {spawn(of_first, "0"), spawn(of_second, "1")}) {
      CHECK(test::outcome_of(rank) == "ends well");
    }
  };
  make(int8, int8, "TESTS_MADE");
  make(int8, fp8, "TESTS_REFUSED");     // as long
  make(rules, rules, "TESTS_REFUSED");  // of one rank
  std::filesystem::remove(file);
}

}  // namespace zcomm
