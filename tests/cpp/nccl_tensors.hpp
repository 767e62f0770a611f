// Tensors of a rank, and its calls on them, for tests of calls over NCCL.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "cuda_helpers.hpp"

namespace zcomm::test {

inline constexpr std::size_t kChunkBytes = 1024;
inline constexpr std::chrono::milliseconds kLong = std::chrono::seconds(60);

// Tensors of one rank, `num_chunks` chunks of float32 per shard.
struct Tensors {
  Tensors(int num_ranks, std::int64_t num_chunks)
      : elements(num_chunks * static_cast<std::int64_t>(kChunkBytes / 4)),
        size(num_ranks),
        whole(static_cast<std::size_t>(elements * size)),
        part(static_cast<std::size_t>(elements)) {}

  void clear(const Stream& stream) const {
    whole.set(std::vector<float>(static_cast<std::size_t>(elements * size)), stream);
  }
  std::vector<TensorView> slots() const {
    return split(TensorView{whole.bytes(), elements * size, DType::float32}, size, elements);
  }
  void gather(Communicator& communicator, const Stream& stream, std::chrono::milliseconds timeout = kLong) const {
    const auto views = slots();
    test::all_gather(communicator, views[static_cast<std::size_t>(communicator.rank())], views,
                     BlockFormat::parse("int8:128"), timeout, stream.view());
  }
  void scatter(Communicator& communicator, const Stream& stream, std::chrono::milliseconds timeout = kLong) const {
    const auto views = slots();
    const std::vector<ConstTensorView> inputs(views.begin(), views.end());
    test::reduce_scatter(communicator, inputs, {part.bytes(), elements, DType::float32},
                         HopFormats::parse("int8:128/int4:128"), 1, timeout, stream.view());
  }
  void all_reduce(Communicator& communicator, const Stream& stream, std::chrono::milliseconds timeout = kLong) const {
    test::all_reduce(communicator, {whole.bytes(), elements * size, DType::float32},
                     HopFormats::parse("int8:128/int4:128"), 1, timeout, stream.view());
  }

  std::int64_t elements;
  int size;
  DeviceArray<float> whole;
  DeviceArray<float> part;
};

}  // namespace zcomm::test
