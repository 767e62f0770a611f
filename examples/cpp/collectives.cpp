// zcomm from C++, without torch or Python: gathers weights and sums gradients, and shows the bytes sent and the errors.
//
//   zcomm_collectives [ranks] [elements of a shard]
//
// Ranks are threads. Each has a GPU, over NCCL, if there are GPUs; otherwise they share the host.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <thread>

#include "buffer.hpp"

namespace {

using Floats = std::vector<float>;
constexpr std::chrono::seconds kTimeout{60};

struct Result {
  std::size_t wire_bytes = 0;
  double error = 0;  // largest of any element
  Floats values;
};

struct Rank {
  Result all_gather, reduce_scatter;
};

// Returns the weights of a rank: the same numbers in every call.
Floats weights(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

double largest_error(const Floats& got, const std::function<double(std::size_t)>& exact) {
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) largest = std::max(largest, std::abs(got[i] - exact(i)));
  return largest;
}

Rank run_rank(zcomm::Communicator& communicator, std::size_t count) {
  const int size = communicator.size();
  const auto shards = static_cast<std::size_t>(size);
  std::vector<Floats> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(weights(rank, count * shards));
  const Floats& own = all[static_cast<std::size_t>(communicator.rank())];
  Rank result;

  Buffer shard(Floats(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(count)));
  Buffer gathered(Floats(count * shards));
  const auto slots = zcomm::split(gathered.view(), size, static_cast<std::int64_t>(count));
  const zcomm::Segment<zcomm::BlockFormat> weights_as{static_cast<std::int64_t>(count),
                                                      zcomm::BlockFormat::parse("int8:256")};
  const zcomm::OperationPtr gather = zcomm::make_all_gather(std::make_shared<const zcomm::GatherPlan>(
      communicator.world(), zcomm::shape_of(slots), zcomm::GatherSegments(&weights_as, 1)));
  const zcomm::ConstTensorView sent = shard.view();
  auto stats = communicator.run(*gather, {{&sent, 1}, slots}, kTimeout);
  result.all_gather = {stats.wire_bytes(), 0, gathered.read()};
  result.all_gather.error =
      largest_error(result.all_gather.values, [&](std::size_t i) { return all[i / count][i % count]; });

  Buffer gradients(own);
  Buffer mean(Floats(count, 0.0f));
  const auto parts = zcomm::split(zcomm::ConstTensorView(gradients.view()), size, static_cast<std::int64_t>(count));
  const zcomm::Segment<zcomm::HopFormats> gradients_as{static_cast<std::int64_t>(count),
                                                       zcomm::HopFormats::parse("int8:128/int4:128")};
  const zcomm::OperationPtr reduce = zcomm::make_reduce_scatter(
      {communicator.world(), zcomm::shape_of(parts), zcomm::ReduceSegments(&gradients_as, 1)});
  const zcomm::TensorView sum = mean.view();
  stats = communicator.run(*reduce, {parts, {&sum, 1}, 1.0f / static_cast<float>(size)}, kTimeout);
  result.reduce_scatter = {stats.wire_bytes(), 0, mean.read()};
  const std::size_t begin = count * static_cast<std::size_t>(communicator.rank());
  result.reduce_scatter.error = largest_error(result.reduce_scatter.values, [&](std::size_t i) {
    double sum = 0;
    for (const Floats& values : all) sum += values[begin + i];
    return sum / size;
  });
  return result;
}

// Calls body(rank) in a thread per rank. Throws the first rank's error.
void in_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::vector<Rank> run(int size, const zcomm::Topology& topology, std::size_t count, bool on_gpus) {
  std::vector<Rank> ranks(static_cast<std::size_t>(size));
  if (on_gpus) {
    const zcomm::NcclUniqueId unique_id = zcomm::make_nccl_unique_id();
    in_threads(size, [&](int rank) {
      const zcomm::CudaDeviceGuard guard(rank);
      zcomm::NcclOptions options;
      options.unique_id = unique_id;
      options.rank = rank;
      options.size = size;
      options.peers = topology.peers(rank);
      auto workspace = zcomm::make_cuda_workspace();
      auto codec = zcomm::make_cuda_codec(*workspace);
      zcomm::Communicator communicator(zcomm::make_nccl_transport(options), topology, std::move(codec),
                                       std::move(workspace));
      ranks[static_cast<std::size_t>(rank)] = run_rank(communicator, count);
    });
  } else {
    auto transports = zcomm::make_local_transports(size);
    in_threads(size, [&](int rank) {
      zcomm::Communicator communicator(std::move(transports[static_cast<std::size_t>(rank)]), topology,
                                       zcomm::make_cpu_codec(), zcomm::make_host_workspace());
      ranks[static_cast<std::size_t>(rank)] = run_rank(communicator, count);
    });
  }
  return ranks;
}

void print(const char* name, const Result& result, std::size_t exact_bytes) {
  std::printf("%-15s %12zu %12zu %8.1fx %10.4f\n", name, result.wire_bytes, exact_bytes,
              static_cast<double>(exact_bytes) / static_cast<double>(result.wire_bytes), result.error);
}

}  // namespace

int main(int argc, char** argv) try {
#ifdef ZCOMM_EXAMPLE_CUDA
  const int num_gpus = zcomm::cuda_device_count();
#else
  const int num_gpus = 0;
#endif
  const int size = argc > 1 ? std::atoi(argv[1]) : num_gpus > 0 ? num_gpus : 4;
  const auto count = static_cast<std::size_t>(argc > 2 ? std::atoll(argv[2]) : 1'000'000);
  if (size < 1 || count < 1 || (num_gpus > 0 && size > num_gpus)) {
    std::fprintf(stderr, "expected 1 or more ranks and elements, and a GPU per rank, got %d, %zu and %d GPUs\n", size,
                 count, num_gpus);
    return 2;
  }
  // Two nodes, as far as zcomm is concerned: 8-bit inside, 4-bit between.
  std::vector<int> node_of;
  for (int rank = 0; rank < size; ++rank) node_of.push_back(2 * rank / size);
  const zcomm::Topology topology(node_of);

  const std::vector<Rank> ranks = run(size, topology, count, num_gpus > 0);
  std::printf("%d ranks on %s, in nodes %s, %zu float32 per shard\n", size, num_gpus > 0 ? "GPUs" : "the CPU",
              topology.to_string().c_str(), count);
  std::printf("%-15s %12s %12s %9s %10s\n", "collective", "bytes sent", "if exact", "", "max error");
  const std::size_t exact_bytes = static_cast<std::size_t>(size - 1) * count * sizeof(float);
  print("all_gather", ranks[0].all_gather, exact_bytes);
  print("reduce_scatter", ranks[0].reduce_scatter, exact_bytes);

  for (const Rank& rank : ranks) {
    if (rank.all_gather.values != ranks[0].all_gather.values) {
      std::fprintf(stderr, "the ranks hold different bits\n");
      return 1;
    }
  }
  std::puts("all ranks hold the same bits");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
