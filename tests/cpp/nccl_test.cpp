// Tests of the NCCL transport, over the NCCL on the host.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "cuda_helpers.hpp"
#include "transport/nccl_symbols.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<unsigned char>;
using test::DeviceArray;
using test::NoTraces;
using test::run_nccl_ranks;
using test::Stream;

std::vector<int> peers_of(const Transport& transport) {
  std::vector<int> peers;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) peers.push_back(peer);
  }
  return peers;
}

void begin(Transport& transport, std::chrono::milliseconds timeout = 60s) {
  transport.begin("test", peers_of(transport), timeout);
}

// Returns byte i of message `number` from one rank to another.
unsigned char expected(int from, int to, int number, std::size_t i) {
  return static_cast<unsigned char>(static_cast<std::size_t>(from * 31 + to * 7 + number * 3) + i);
}

Bytes message(int from, int to, int number, std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = expected(from, to, number, i);
  return bytes;
}

}  // namespace

TEST_CASE("nccl: the library is found once, what is missing is named") {
  const auto [path, version] = load_nccl();
  CHECK(version == 22809);
  CHECK(path.find("libnccl.so.2") != std::string::npos);
  CHECK(load_nccl("/somewhere/else") == std::pair(path, version));

  // Accepts any path to the mapped file; any other file would be a second copy.
  CHECK(nccl::open_library(path, "").path == path);
  CHECK(nccl::open_library("", "/no/such/wheel").path == path);
  CHECK_THROWS_WITH_AS(nccl::open_library("/no/such/libnccl.so.2", ""),
                       doctest::Contains("/no/such/libnccl.so.2, but this process has NCCL already, from "),
                       TransportError);
  void* other = dlopen("libz.so.1", RTLD_NOW);
  if (other == nullptr) other = dlopen("libm.so.6", RTLD_NOW);
  Dl_info info{};
  REQUIRE(dladdr(dlsym(other, "zlibVersion") != nullptr ? dlsym(other, "zlibVersion") : dlsym(other, "sin"), &info) !=
          0);
  CHECK_THROWS_WITH_AS(nccl::open_library(info.dli_fname, ""),
                       doctest::Contains("NCCL: expected 2.27.3 or later, got one without ncclGetVersion"),
                       TransportError);
}

TEST_CASE("nccl: all_gather fills every slot, of any size, between 1 to 8 ranks") {
  const NoTraces no_traces;
  for (const int size : {1, 2, 3, 5, 8}) {
    run_nccl_ranks(size, [&](int rank, const NcclOptions& options) {
      const auto transport = make_nccl_transport(options);
      CHECK(transport->rank() == rank);
      CHECK(transport->size() == size);
      Stream stream;
      for (const std::size_t slot : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{40'001}}) {
        DeviceArray<unsigned char> slots(slot * static_cast<std::size_t>(size));
        Bytes initial(slot * static_cast<std::size_t>(size));
        for (std::size_t i = 0; i < slot; ++i) {
          initial[static_cast<std::size_t>(rank) * slot + i] = expected(rank, 0, 0, i);
        }
        slots.set(initial, stream);
        begin(*transport);
        transport->all_gather(slots.bytes(), slot, stream.view())->wait(stream.view());
        const Bytes gathered = slots.get(stream);
        for (std::size_t i = 0; i < gathered.size(); ++i) {
          REQUIRE(gathered[i] == expected(static_cast<int>(i / slot), 0, 0, i % slot));
        }
      }
    });
  }
}

TEST_CASE("nccl: many transfers under way at once, odd and zero sizes, messages in order") {
  const NoTraces no_traces;
  cuda_host::set_delays(7, 300us);
  constexpr int kSize = 4;
  constexpr int kTransfers = 12;
  const auto size_of = [](int from, int to, int number) {
    return static_cast<std::size_t>((from * 5 + to * 3 + number) % 4 == 0 ? 0 : 1 + 977 * ((from + to + number) % 7));
  };
  run_nccl_ranks(kSize, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    begin(*transport);
    std::vector<std::unique_ptr<DeviceArray<unsigned char>>> outgoing;
    std::vector<std::unique_ptr<DeviceArray<unsigned char>>> incoming;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int number = 0; number < kTransfers; ++number) {
      std::vector<Send> sends;
      std::vector<Recv> recvs;
      for (const int peer : peers_of(*transport)) {
        const std::size_t out = size_of(rank, peer, number);
        const std::size_t in = size_of(peer, rank, number);
        outgoing.push_back(std::make_unique<DeviceArray<unsigned char>>(out));
        incoming.push_back(std::make_unique<DeviceArray<unsigned char>>(in));
        outgoing.back()->set(message(rank, peer, number, out), stream);
        sends.push_back({peer, outgoing.back()->bytes(), out});
        recvs.push_back({peer, incoming.back()->bytes(), in});
      }
      transfers.push_back(transport->start(sends, recvs, stream.view()));
    }
    for (auto& transfer : transfers) transfer->wait(stream.view());
    std::size_t next = 0;
    for (int number = 0; number < kTransfers; ++number) {
      for (const int peer : peers_of(*transport)) {
        CHECK(incoming[next++]->get(stream) == message(peer, rank, number, size_of(peer, rank, number)));
      }
    }
  });
  cuda_host::set_delays(0, 0us);
}

TEST_CASE("nccl: a buffer that is used again by a later chunk, as the pipeline of a collective does") {
  const NoTraces no_traces;
  cuda_host::set_delays(3, 500us);
  constexpr std::size_t kBytes = 3000;
  constexpr int kDepth = 2;
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    const int peer = 1 - rank;
    Stream stream;
    DeviceArray<unsigned char> out(kDepth * kBytes);
    DeviceArray<unsigned char> in(kDepth * kBytes);
    std::array<std::unique_ptr<Transfer>, kDepth> transfers;
    std::atomic<int> num_wrong = 0;
    begin(*transport);
    const auto finish = [&](int chunk) {
      transfers[static_cast<std::size_t>(chunk % kDepth)]->wait(stream.view());
      cuda_host::enqueue(stream, [&, chunk] {
        const unsigned char* data = in.data() + static_cast<std::size_t>(chunk % kDepth) * kBytes;
        const Bytes right = message(peer, rank, chunk, kBytes);
        num_wrong += std::memcmp(data, right.data(), kBytes) != 0;
      });
    };
    for (int chunk = 0; chunk < 20; ++chunk) {
      const std::size_t offset = static_cast<std::size_t>(chunk % kDepth) * kBytes;
      if (chunk >= kDepth) finish(chunk - kDepth);
      cuda_host::enqueue(stream, [&, chunk, offset] {
        const Bytes bytes = message(rank, peer, chunk, kBytes);
        std::copy(bytes.begin(), bytes.end(), out.data() + offset);
      });
      const Send send{peer, out.bytes() + offset, kBytes};
      const Recv recv{peer, in.bytes() + offset, kBytes};
      transfers[static_cast<std::size_t>(chunk % kDepth)] = transport->start({&send, 1}, {&recv, 1}, stream.view());
    }
    finish(18);
    finish(19);
    synchronize(stream.view());
    CHECK(num_wrong == 0);
  });
  cuda_host::set_delays(0, 0us);
}

TEST_CASE("nccl: the transfers of a group go out together when it ends, and the host never waits") {
  const NoTraces no_traces;
  std::atomic<int> num_queued = 0;
  const int before = nccl_host_num_launches();
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    const int peer = 1 - rank;
    Stream stream;
    DeviceArray<unsigned char> out(2);
    DeviceArray<unsigned char> in(4);
    std::atomic<bool> open = false;
    cuda_host::enqueue(stream, [&] {
      while (!open) std::this_thread::sleep_for(100us);
    });
    out.set({static_cast<unsigned char>(rank), static_cast<unsigned char>(rank + 10)}, stream);
    in.set(Bytes(4, static_cast<unsigned char>(rank + 20)), stream);
    begin(*transport);
    const Send first_send{peer, out.bytes(), 1};
    const Recv first_recv{peer, in.bytes(), 1};
    const Send second_send{peer, out.bytes() + 1, 1};
    const Recv second_recv{peer, in.bytes() + 1, 1};
    transport->begin_group();
    auto first = transport->start({&first_send, 1}, {&first_recv, 1}, stream.view());
    auto second = transport->start({&second_send, 1}, {&second_recv, 1}, stream.view());
    auto third = transport->all_gather(in.bytes() + 2, 1, stream.view());
    CHECK_THROWS_WITH_AS(first->wait(stream.view()), doctest::Contains("before its group was ended"), TransportError);
    transport->end_group(stream.view());
    transport->begin_group();
    transport->end_group(stream.view());  // an empty one
    for (auto* transfer : {&second, &first, &third}) (*transfer)->wait(stream.view());
    ++num_queued;
    while (num_queued < 2) std::this_thread::sleep_for(1ms);
    open = true;
    CHECK(in.get(stream) == Bytes{static_cast<unsigned char>(peer), static_cast<unsigned char>(peer + 10), 20, 21});
  });
  // Expects three launches to connect, for messages and for small and large gathers, one to compare the call, then one.
  CHECK(nccl_host_num_launches() - before == 2 * (4 + 1));
}

TEST_CASE("nccl: a start without bytes is no group, but counts as a start") {
  const NoTraces no_traces;
  const int before = nccl_host_num_launches();
  run_nccl_ranks(2, [&](int, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    const int peer = 1 - options.rank;
    Stream stream;
    DeviceArray<unsigned char> bytes(2);
    bytes.set({1, 2}, stream);
    begin(*transport);
    const Send empty_send{peer, nullptr, 0};
    const Recv empty_recv{peer, nullptr, 0};
    transport->start({&empty_send, 1}, {&empty_recv, 1}, stream.view())->wait(stream.view());
    transport->start({}, {}, stream.view())->wait(stream.view());
    const Send send{peer, bytes.bytes(), 1};
    const Recv recv{peer, bytes.bytes() + 1, 1};
    transport->start({&send, 1}, {&recv, 1}, stream.view())->wait(stream.view());
    CHECK(bytes.get(stream) == Bytes{1, 1});
  });
  CHECK(nccl_host_num_launches() - before == 2 * (4 + 1));  // three to connect, one to compare the call
}

TEST_CASE("nccl: the steady state creates no events, streams or memory") {
  const NoTraces no_traces;
  std::atomic<std::int64_t> created = 0;
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> slots(64);
    slots.set(Bytes(64), stream);
    const auto use = [&] {
      begin(*transport);
      for (int i = 0; i < 8; ++i) transport->all_gather(slots.bytes(), 32, stream.view())->wait(stream.view());
      synchronize(stream.view());
    };
    for (int i = 0; i < 3; ++i) use();
    if (rank == 0) created = cuda_host::num_creations();
    for (int i = 0; i < 50; ++i) use();
    // The peer may have made its own communicator before this rank counted.
    if (rank == 0) CHECK(cuda_host::num_creations() - created <= 16);
  });
}

TEST_CASE("nccl: transfers are captured in a graph and move new bytes at each launch") {
  const NoTraces no_traces;
  run_nccl_ranks(3, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> slots(3 * 100);
    cudaGraphExec_t graph = test::capture(stream, [&] {
      begin(*transport, 1s);  // captured transfers have no deadline; to capture them takes time on a busy machine
      for (int i = 0; i < 2; ++i) transport->all_gather(slots.bytes(), 100, stream.view())->wait(stream.view());
    });
    std::this_thread::sleep_for(1100ms);
    for (int round = 0; round < 3; ++round) {
      Bytes initial(300);
      for (std::size_t i = 0; i < 100; ++i)
        initial[static_cast<std::size_t>(rank) * 100 + i] = expected(rank, 0, round, i);
      slots.set(initial, stream);
      REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
      const Bytes gathered = slots.get(stream);
      for (std::size_t i = 0; i < 300; ++i)
        REQUIRE(gathered[i] == expected(static_cast<int>(i / 100), 0, round, i % 100));
    }
    // Calls eagerly after the graph.
    begin(*transport);
    transport->all_gather(slots.bytes(), 100, stream.view())->wait(stream.view());
    synchronize(stream.view());
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
  });
}

TEST_CASE("nccl: a graph goes on after its transport") {
  // One communicator per rank stays open, because nothing tells when the last graph is gone.
  const int before = nccl_host_live_communicators();
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    Stream stream;
    DeviceArray<unsigned char> bytes(2);
    auto transport = make_nccl_transport(options);
    cudaGraphExec_t graph = test::capture(stream, [&] {
      begin(*transport);
      transport->all_gather(bytes.bytes(), 1, stream.view())->wait(stream.view());
    });
    transport.reset();
    bytes.set({static_cast<unsigned char>(rank), static_cast<unsigned char>(rank)}, stream);
    REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
    CHECK(bytes.get(stream) == Bytes{0, 1});
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
  });
  CHECK(nccl_host_live_communicators() == before + 2);
  CHECK(std::string(nccl_host_take_misuse()) == "");
}

TEST_CASE("nccl: finish() has no limit of its own for a call without a timeout") {
  const NoTraces no_traces;
  run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const auto transport = make_nccl_transport(options);
    Stream stream;
    DeviceArray<unsigned char> bytes(64);
    const auto gather = [&](std::chrono::milliseconds timeout) {
      transport->begin("a gather", peers_of(*transport), timeout);
      transport->all_gather(bytes.bytes(), 32, stream.view())->wait(stream.view());
      transport->finish();
    };
    gather(60s);
    if (rank == 1) std::this_thread::sleep_for(11s);  // a destructor waits for 10 s
    gather(std::chrono::milliseconds::max());
    CHECK_NOTHROW(gather(60s));
  });
}

TEST_CASE("nccl: no transport is made while a graph is captured") {
  const NoTraces no_traces;
  Stream stream;
  NcclOptions options;
  options.unique_id = make_nccl_unique_id();
  const auto make = [&] { test::capture(stream, [&] { make_nccl_transport(options); }); };
  CHECK_THROWS_WITH_AS(make(), doctest::Contains("cannot connect while a CUDA graph is captured"), TransportError);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("nccl: a rank that never connects is a timeout, a wrong rank an argument error") {
  const NoTraces no_traces;
  NcclOptions options;
  options.unique_id = make_nccl_unique_id();
  options.size = 2;
  options.connect_timeout = 50ms;
  CHECK_THROWS_WITH_AS(make_nccl_transport(options),
                       doctest::Contains("rank 0 of 2 could not connect over NCCL within 50 ms"), TimeoutError);
  options.rank = 2;
  CHECK_THROWS_WITH_AS(make_nccl_transport(options), doctest::Contains("rank: expected 0 to 1, got 2"), ArgumentError);
}

}  // namespace zcomm
