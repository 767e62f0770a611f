// Whole collectives on GPUs: kernels, device scratch and NCCL, over tests/cuda_host. Their bytes are those of the CPU.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "calls.hpp"
#include "cuda_helpers.hpp"
#include "sanitizers.hpp"
#include "zcomm/call.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<unsigned char>;
using test::DeviceArray;
using test::NoTraces;
using test::Stream;

struct Setup {
  std::vector<int> ids;
  DType dtype = DType::float32;
  std::int64_t shard_elements = 0;
  HopFormats formats;
  std::size_t chunk_bytes = kDefaultChunkBytes;

  int size() const { return static_cast<int>(ids.size()); }
  std::size_t shard_bytes() const { return static_cast<std::size_t>(shard_elements) * element_size(dtype); }
  std::size_t tensor_bytes() const { return shard_bytes() * ids.size(); }
};

// Values of all magnitudes that the dtype has in the middle of its range.
Bytes random_tensor(const Setup& setup, int rank, unsigned seed) {
  std::mt19937 random(seed * 1000 + static_cast<unsigned>(rank));
  Bytes bytes(setup.tensor_bytes());
  const std::size_t width = element_size(setup.dtype);
  for (std::size_t i = 0; i < bytes.size() / width; ++i) {
    const auto sign_and_fraction = static_cast<std::uint32_t>(random());
    const auto exponent = static_cast<std::uint32_t>(random() % 12);
    std::uint32_t bits = 0;
    if (setup.dtype == DType::float32) bits = (sign_and_fraction & 0x807fffff) | (118 + exponent) << 23;
    if (setup.dtype == DType::bfloat16) bits = (sign_and_fraction & 0x807f) | (118 + exponent) << 7;
    if (setup.dtype == DType::float16) bits = (sign_and_fraction & 0x83ff) | (6 + exponent) << 10;
    std::memcpy(&bytes[i * width], &bits, width);
  }
  return bytes;
}

std::unique_ptr<Communicator> make_communicator(const Setup& setup, const NcclOptions& options) {
  auto transport = make_nccl_transport(options);
  auto workspace = make_cuda_workspace();
  auto codec = make_cuda_codec(*workspace);
  return std::make_unique<Communicator>(std::move(transport), Topology(setup.ids), std::move(codec),
                                        std::move(workspace), setup.chunk_bytes);
}

// Tensors that the three collectives read and write.
struct Tensors {
  std::byte* gathered;     // in place
  std::byte* input;        // of the reduce_scatter
  std::byte* output;       // of the reduce_scatter
  std::byte* all_reduced;  // in place
};

void gather(Communicator& communicator, const Setup& setup, std::byte* tensor, StreamView stream) {
  const TensorView whole{tensor, setup.shard_elements * setup.size(), setup.dtype};
  const auto slots = split(whole, setup.size(), setup.shard_elements);
  test::all_gather(communicator, slots[static_cast<std::size_t>(communicator.rank())], slots, setup.formats.intra_node,
                   60s, stream);
}

void run_all(Communicator& communicator, const Setup& setup, const Tensors& tensors, StreamView stream) {
  gather(communicator, setup, tensors.gathered, stream);
  const std::int64_t elements = setup.shard_elements * setup.size();
  const auto slots = split(TensorView{tensors.input, elements, setup.dtype}, setup.size(), setup.shard_elements);
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  test::reduce_scatter(communicator, inputs, {tensors.output, setup.shard_elements, setup.dtype}, setup.formats, 0.25f,
                       60s, stream);
  test::all_reduce(communicator, {tensors.all_reduced, elements, setup.dtype}, setup.formats, 0.5f, 60s, stream);
}

// The results of run_all(), one after another, of every rank, on the CPU.
std::vector<Bytes> expected(const Setup& setup, unsigned seed) {
  auto communicators = test::make_communicators(setup.ids, setup.chunk_bytes);
  std::vector<Bytes> results(setup.ids.size());
  test::run_ranks(setup.size(), [&](int rank) {
    Bytes gathered = random_tensor(setup, rank, seed);
    Bytes input = gathered;
    Bytes all_reduced = gathered;
    Bytes output(setup.shard_bytes());
    const auto data = [](Bytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); };
    run_all(*communicators[static_cast<std::size_t>(rank)], setup,
            {data(gathered), data(input), data(output), data(all_reduced)}, {});
    Bytes& result = results[static_cast<std::size_t>(rank)];
    for (const Bytes& part : {gathered, output, all_reduced}) result.insert(result.end(), part.begin(), part.end());
  });
  return results;
}

// Tensors on a device.
struct DeviceTensors {
  explicit DeviceTensors(const Setup& setup)
      : gathered(setup.tensor_bytes()),
        input(setup.tensor_bytes()),
        output(setup.shard_bytes()),
        all_reduced(setup.tensor_bytes()) {}
  void set(const Bytes& tensor, cudaStream_t stream) const {
    for (const auto* array : {&gathered, &input, &all_reduced}) array->set(tensor, stream);
  }
  Bytes get(cudaStream_t stream) const {
    Bytes result;
    for (const auto* array : {&gathered, &output, &all_reduced}) {
      const Bytes part = array->get(stream);
      result.insert(result.end(), part.begin(), part.end());
    }
    return result;
  }
  Tensors view() const { return {gathered.bytes(), input.bytes(), output.bytes(), all_reduced.bytes()}; }

  DeviceArray<unsigned char> gathered;
  DeviceArray<unsigned char> input;
  DeviceArray<unsigned char> output;
  DeviceArray<unsigned char> all_reduced;
};

void check_like_cpu(const Setup& setup) {
  const std::vector<Bytes> results = expected(setup, 1);
  test::run_nccl_ranks(setup.size(), [&](int rank, const NcclOptions& options) {
    const auto communicator = make_communicator(setup, options);
    Stream stream;
    const DeviceTensors tensors(setup);
    tensors.set(random_tensor(setup, rank, 1), stream);
    run_all(*communicator, setup, tensors.view(), stream.view());
    CHECK(tensors.get(stream) == results[static_cast<std::size_t>(rank)]);
  });
}

const Setup kTwoByTwo{test::node_ids({2, 2}), DType::float32, 1500, HopFormats::parse("int8:128/int4:128"), 2048};

}  // namespace

TEST_CASE("cuda collectives: the bytes of the CPU, for every node shape") {
  const NoTraces no_traces;
  for (const auto& ids :
       {test::node_ids({1}), test::node_ids({4}), test::node_ids({2, 2}), test::node_ids({1, 1, 1, 1}),
        test::node_ids({4, 4}), test::node_ids({3, 1}), test::node_ids({2, 2, 2}, true)}) {
    for (const std::int64_t elements : {1, 129, 1000}) {
      if (test::kThreadSanitizer && elements != 129) continue;
      check_like_cpu({ids, DType::float32, elements, HopFormats::parse("int8:128/int4:128"), 1024});
    }
  }
}

TEST_CASE("cuda collectives: the bytes of the CPU, for every dtype and format") {
  const NoTraces no_traces;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    if (test::kThreadSanitizer && dtype != DType::float32) continue;
    for (const char* formats : {"int8:64/int4:96", "int4:32", "bf16/int8:256", "exact", "eden4:64/eden2:128"}) {
      if (dtype != DType::float32 && std::string(formats).find("bf16") != std::string::npos) continue;
      for (const auto& ids : {test::node_ids({2, 2}), test::node_ids({2, 1})}) {
        check_like_cpu({ids, dtype, 777, HopFormats::parse(formats), 512});
      }
    }
  }
}

// Each parameter of a module may be a segment, of which many are sent as they are.
TEST_CASE("cuda collectives: a gather of many segments is a few launches, with the bytes of the CPU") {
  const NoTraces no_traces;
  constexpr std::int64_t kElements = 37;  // of a segment
  for (const std::int64_t num_of_each : {1, 48, 145, 200}) {
    CAPTURE(num_of_each);
    std::vector<Segment<BlockFormat>> segments;
    for (std::int64_t i = 0; i < num_of_each; ++i) {
      for (const char* format : {"int8:32", "exact", "bf16"})
        segments.push_back({kElements, BlockFormat::parse(format)});
    }
    const Setup setup{{0, 0}, DType::float32, 3 * num_of_each * kElements, {}};
    const auto gather = [&](Communicator& communicator, std::byte* data, StreamView stream) {
      const auto slots = split(TensorView{data, 2 * setup.shard_elements, setup.dtype}, 2, setup.shard_elements);
      test::all_gather(communicator, slots[static_cast<std::size_t>(communicator.rank())], slots, segments, 60s,
                       stream);
    };
    std::vector<Bytes> results(2);
    auto communicators = test::make_communicators(setup.ids);
    test::run_ranks(2, [&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      results[r] = random_tensor(setup, rank, 1);
      gather(*communicators[r], reinterpret_cast<std::byte*>(results[r].data()), {});
    });
    const std::int64_t before = cuda_host::calls().launches;
    test::run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
      const auto communicator = make_communicator(setup, options);
      Stream stream;
      const DeviceArray<unsigned char> tensor(setup.tensor_bytes());
      tensor.set(random_tensor(setup, rank, 1), stream);
      gather(*communicator, tensor.bytes(), stream.view());
      synchronize(stream.view());
      CHECK(tensor.get(stream) == results[static_cast<std::size_t>(rank)]);
    });
    const auto launches = [](std::int64_t jobs, std::int64_t in_one) { return (jobs + in_one - 1) / in_one; };
    // Codes, casts, and copies with the zeros after casts; then two slots are decoded, and what was sent is copied.
    const std::int64_t expected = launches(num_of_each, 112) + launches(num_of_each, 32) +
                                  launches(2 * num_of_each, 145) + launches(2 * num_of_each, 76) +
                                  launches(2 * num_of_each, 32) + launches(2 * num_of_each, 145);
    // The tensor to the host; what ranks agree on as they connect, and the words of a first call, there and back.
    constexpr std::int64_t kCopies = 5;
    CHECK(cuda_host::calls().launches - before == 2 * (expected + kCopies));
  }
}

TEST_CASE("cuda collectives: late operations change nothing") {
  const NoTraces no_traces;
  cuda_host::set_delays(11, 500us);
  check_like_cpu(kTwoByTwo);
  cuda_host::set_delays(0, 0us);
}

TEST_CASE("cuda collectives: calls back to back, on one stream and on two, while the host runs ahead") {
  const NoTraces no_traces;
  cuda_host::set_delays(5, 200us);
  const std::vector<Bytes> first_results = expected(kTwoByTwo, 1);
  const std::vector<Bytes> second_results = expected(kTwoByTwo, 2);
  for (const bool one_stream : {true, false}) {
    std::atomic<int> num_queued = 0;
    test::run_nccl_ranks(4, [&](int rank, const NcclOptions& options) {
      const auto r = static_cast<std::size_t>(rank);
      const auto communicator = make_communicator(kTwoByTwo, options);
      Stream stream;
      Stream another;
      const Stream& second_stream = one_stream ? stream : another;
      const DeviceTensors first(kTwoByTwo);
      const DeviceTensors second(kTwoByTwo);
      std::atomic<bool> open = false;
      cuda_host::enqueue(stream, [&] {
        while (!open) std::this_thread::sleep_for(100us);
      });
      first.set(random_tensor(kTwoByTwo, rank, 1), stream);
      second.set(random_tensor(kTwoByTwo, rank, 2), second_stream);
      run_all(*communicator, kTwoByTwo, first.view(), stream.view());
      run_all(*communicator, kTwoByTwo, second.view(), second_stream.view());
      ++num_queued;
      while (num_queued < 4) std::this_thread::sleep_for(1ms);  // on all ranks, before any of it can run
      open = true;
      CHECK(second.get(second_stream) == second_results[r]);
      CHECK(first.get(stream) == first_results[r]);
    });
  }
  cuda_host::set_delays(0, 0us);
}

TEST_CASE("cuda collectives: a captured call gives the right result for new values at each launch") {
  const NoTraces no_traces;
  for (const auto& ids : {test::node_ids({2, 2}), test::node_ids({3})}) {
    Setup setup = kTwoByTwo;
    setup.ids = ids;
    std::vector<std::vector<Bytes>> results;
    for (unsigned seed = 0; seed < 3; ++seed) results.push_back(expected(setup, seed));
    test::run_nccl_ranks(setup.size(), [&](int rank, const NcclOptions& options) {
      const auto communicator = make_communicator(setup, options);
      Stream stream;
      const DeviceTensors tensors(setup);
      tensors.set(random_tensor(setup, rank, 9), stream);
      run_all(*communicator, setup, tensors.view(), stream.view());  // allocates the scratch
      cudaGraphExec_t graph =
          test::capture(stream, [&] { run_all(*communicator, setup, tensors.view(), stream.view()); });
      for (unsigned seed = 0; seed < 3; ++seed) {
        tensors.set(random_tensor(setup, rank, seed), stream);
        REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
        CHECK(tensors.get(stream) == results[seed][static_cast<std::size_t>(rank)]);
        // A call beside the graph has scratch of its own.
        tensors.set(random_tensor(setup, rank, seed), stream);
        run_all(*communicator, setup, tensors.view(), stream.view());
        CHECK(tensors.get(stream) == results[seed][static_cast<std::size_t>(rank)]);
      }
      REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
    });
  }
}

TEST_CASE("cuda collectives: a graph captures no stochastic rounding, whose replays would draw the same bits") {
  const NoTraces no_traces;
  test::run_nccl_ranks(2, [&](int, const NcclOptions& options) {
    // The gather of an all-reduce takes the format inside of nodes for all.
    const Setup setup{{0, 1}, DType::float32, 64, HopFormats::parse("int8:32:stochastic/int8:32"), kDefaultChunkBytes};
    const auto communicator = make_communicator(setup, options);
    Stream stream;
    DeviceArray<unsigned char> tensor(setup.tensor_bytes());
    tensor.set(Bytes(setup.tensor_bytes()), stream);
    const TensorView view{tensor.bytes(), 128, DType::float32};
    const auto call = [&] { test::all_reduce(*communicator, view, setup.formats, 1, 20s, stream.view()); };
    call();
    cudaGraphExec_t graph = test::capture(stream, [&] {
      CHECK_THROWS_WITH_AS(call(), doctest::Contains("would round with the same random bits"), ArgumentError);
    });
    REQUIRE(cudaGraphExecDestroy(graph) == cudaSuccess);
    call();
    synchronize(stream.view());
  });
}

TEST_CASE("cuda collectives: a capture that lacks scratch is refused, and ends neither the group nor graphs before") {
  const NoTraces no_traces;
  std::vector<std::vector<Bytes>> results;
  for (unsigned seed = 0; seed < 2; ++seed) results.push_back(expected(kTwoByTwo, seed));
  test::run_nccl_ranks(kTwoByTwo.size(), [&](int rank, const NcclOptions& options) {
    const auto communicator = make_communicator(kTwoByTwo, options);
    Stream stream;
    const DeviceTensors tensors(kTwoByTwo);
    const auto call = [&] { run_all(*communicator, kTwoByTwo, tensors.view(), stream.view()); };
    tensors.set(random_tensor(kTwoByTwo, rank, 9), stream);
    call();
    cudaGraphExec_t first = test::capture(stream, call);  // takes the scratch along
    cudaGraphExec_t second = test::capture(
        stream, [&] { CHECK_THROWS_WITH_AS(call(), doctest::Contains("would have to be allocated"), Error); });
    for (unsigned seed = 0; seed < 2; ++seed) {
      tensors.set(random_tensor(kTwoByTwo, rank, seed), stream);
      if (seed == 0) REQUIRE(cudaGraphLaunch(first, stream) == cudaSuccess);
      if (seed == 1) call();
      CHECK(tensors.get(stream) == results[seed][static_cast<std::size_t>(rank)]);
    }
    REQUIRE(cudaGraphExecDestroy(first) == cudaSuccess);
    REQUIRE(cudaGraphExecDestroy(second) == cudaSuccess);
  });
}

TEST_CASE("cuda collectives: a rank that calls something else is a timeout on all, with its own call in the message") {
  const NoTraces no_traces;
  std::atomic<int> num_failures = 0;
  test::run_nccl_ranks(2, [&](int rank, const NcclOptions& options) {
    const Setup setup{{0, 0}, DType::float32, 64, HopFormats::parse("int8:32"), kDefaultChunkBytes};
    const auto communicator = make_communicator(setup, options);
    Stream stream;
    DeviceArray<unsigned char> tensor(setup.tensor_bytes());
    tensor.set(Bytes(setup.tensor_bytes()), stream);
    const TensorView view{tensor.bytes(), 128, DType::float32};
    if (rank == 1) {  // never calls
      while (num_failures == 0) std::this_thread::sleep_for(1ms);
      return;
    }
    // The first call returns before its time is up, or fails itself on a busy machine.
    const auto call_until_it_fails = [&] {
      test::all_reduce(*communicator, view, setup.formats, 1, 2s, stream.view());
      synchronize(stream.view());
      test::all_reduce(*communicator, view, setup.formats, 1, 2s, stream.view());
    };
    CHECK_THROWS_WITH_AS(call_until_it_fails(),
                         doctest::Contains("in all_reduce float32[1 x 128] int8:32 times 1: not done within"),
                         TimeoutError);
    ++num_failures;
  });
  CHECK(num_failures == 1);
}

}  // namespace zcomm
