// Tensors that the ranks of a test gather by lossless differences on GPUs, over tests/cuda_host.
#pragma once

#include <optional>
#include <vector>

#include "cuda_helpers.hpp"
#include "half_weights.hpp"
#include "zcomm/call.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm::test {

inline constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(60);
inline const std::vector<int> kTwoNodes{0, 0, 1, 1};

// One tensor that a rank gathers. Modules of other numbers have other weights.
struct Module {
  Module(Communicator& communicator_of_rank, const std::vector<std::size_t>& lengths, int number_of_module = 0,
         DType dtype_of_slots = DType::bfloat16)
      : communicator(communicator_of_rank),
        number(number_of_module),
        dtype(dtype_of_slots),
        slots(lengths),
        shard(slots[static_cast<std::size_t>(communicator.rank())]) {
    std::size_t total = 0;
    for (const std::size_t length : lengths) total += length;
    output.emplace(total + 1);
    TensorView rest{output->bytes(), static_cast<std::int64_t>(total), dtype};
    std::int64_t begin = 0;
    for (const std::size_t length : lengths) {
      views.push_back(rest.slice(begin, static_cast<std::int64_t>(length)));
      begin += static_cast<std::int64_t>(length);
    }
    plan = std::make_shared<const LosslessPlan>(communicator.world(), shape_of(views));
    memory.emplace(plan->secondary_bytes());
    kept->memory = {memory->bytes(), plan->secondary_bytes()};
    operation = make_lossless_gather(plan, kept);
  }

  Halves weights(int rank, int step) const {
    return weights_of(rank + 100 * number, slots[static_cast<std::size_t>(rank)], step);
  }
  ConstTensorView shard_view() const {
    return TensorView{shard.bytes(), static_cast<std::int64_t>(slots[static_cast<std::size_t>(communicator.rank())]),
                      dtype};
  }
  // Sets, on `stream`, the shard of `step`, and clears the output.
  void set(int step, cudaStream_t stream) const {
    shard.set(weights(communicator.rank(), step), stream);
    output->set(Halves(output->size(), 0xdead), stream);
  }
  CallStats gather(StreamView stream) {
    const ConstTensorView own = shard_view();
    return communicator.run(*operation, {{&own, 1}, views}, timeout, stream);
  }
  CallStats gather_again(StreamView stream) { return communicator.run(*operation, {{}, views}, timeout, stream); }
  Halves expected(int step) const {
    Halves all;
    for (std::size_t rank = 0; rank < slots.size(); ++rank) {
      const Halves values = weights(static_cast<int>(rank), step);
      all.insert(all.end(), values.begin(), values.end());
    }
    all.push_back(0xdead);
    return all;
  }

  Communicator& communicator;
  int number;
  DType dtype;
  std::vector<std::size_t> slots;
  DeviceArray<std::uint16_t> shard;
  std::optional<DeviceArray<std::uint16_t>> output;
  std::vector<TensorView> views;
  std::shared_ptr<const LosslessPlan> plan;
  std::optional<DeviceArray<std::byte>> memory;
  std::shared_ptr<SecondaryShard> kept = std::make_shared<SecondaryShard>();
  GatherPtr operation;
  std::chrono::milliseconds timeout = kTimeout;
};

// Calls body(communicator) on every rank, each with a GPU.
template <class Body>
void run(const std::vector<int>& ids, std::size_t chunk_bytes, Body&& body) {
  run_nccl_ranks(static_cast<int>(ids.size()), [&](int, const NcclOptions& options) {
    const auto communicator = make_cuda_communicator(ids, chunk_bytes, options);
    body(*communicator);
  });
}

inline CallStats prepare(Communicator& communicator, std::vector<Module*> modules, StreamView stream) {
  std::vector<GatherPtr> gathers;
  std::vector<ConstTensorView> shards;
  for (Module* module : modules) {
    gathers.push_back(module->operation);
    shards.push_back(module->shard_view());
  }
  const OperationPtr preparation = make_preparation(std::move(gathers));
  return communicator.run(*preparation, {shards}, modules.front()->timeout, stream);
}

inline std::vector<std::size_t> even(const std::vector<int>& ids, std::size_t length) {
  return std::vector<std::size_t>(ids.size(), length);
}

}  // namespace zcomm::test
