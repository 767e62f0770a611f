// Calls of a program, with what zcomm's own communicator and NCCL make of them.
#pragma once

#include "calls.hpp"
#include "front_ranks.hpp"

namespace zcomm::test {

inline const HopFormats kFormats = HopFormats::parse("int8:128/int4:128");
inline const BlockFormat kGatherFormat = BlockFormat::parse("int8:256");

enum class Kind { gather, scatter, all_reduce };
using Bytes = std::vector<std::uint8_t>;

// Kind of a call, elements of a slot (of the tensor, if it is an all-reduce), type and operation.
struct Case {
  Kind kind;
  std::size_t count;
  DType dtype = DType::float32;
  unsigned op = kSum;
  bool in_place = false;
  int size = 4;

  std::size_t input_elements() const { return kind == Kind::scatter ? count * static_cast<std::size_t>(size) : count; }
  std::size_t output_elements() const { return kind == Kind::gather ? count * static_cast<std::size_t>(size) : count; }
  unsigned type() const { return dtype == DType::float32 ? kFloat32 : dtype == DType::bfloat16 ? 9 : 6; }
};

// Returns values of 1 to 2, and of both signs, whatever the type.
inline Bytes input_of(const Case& the_case, int rank, unsigned seed = 0) {
  std::mt19937 random(seed * 100 + static_cast<unsigned>(rank));
  Bytes bytes(the_case.input_elements() * element_size(the_case.dtype));
  for (std::size_t i = 0; i < the_case.input_elements(); ++i) {
    const std::uint32_t sign = random() % 2 << 31;
    const std::uint32_t bits = sign | 0x3f800000u | (random() & 0x7fffffu);
    const auto half = static_cast<std::uint16_t>(
        the_case.dtype == DType::float16 ? sign >> 16 | 0x3c00u | (random() & 0x3ffu) : bits >> 16);
    if (the_case.dtype == DType::float32) std::memcpy(&bytes[4 * i], &bits, 4);
    if (the_case.dtype != DType::float32) std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

// Returns each rank's output by zcomm's own communicator, on the CPU.
inline std::vector<Bytes> compressed(const Case& the_case, const std::vector<int>& nodes = {0, 0, 1, 1},
                                     unsigned seed = 0) {
  auto communicators = make_communicators(nodes);
  std::vector<Bytes> results(nodes.size());
  run_ranks(static_cast<int>(nodes.size()), [&](int rank) {
    Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
    Bytes input = input_of(the_case, rank, seed);
    Bytes& output = results[static_cast<std::size_t>(rank)];
    output.resize(the_case.output_elements() * element_size(the_case.dtype));
    const auto view = [&](Bytes& bytes, std::size_t elements) {
      return TensorView{reinterpret_cast<std::byte*>(bytes.data()), static_cast<std::int64_t>(elements),
                        the_case.dtype};
    };
    const TensorView from = view(input, the_case.input_elements());
    const TensorView to = view(output, the_case.output_elements());
    const float factor = the_case.op == kAverage ? 1.0f / static_cast<float>(nodes.size()) : 1.0f;
    const auto count = static_cast<std::int64_t>(the_case.count);
    const int size = communicator.size();
    if (the_case.kind == Kind::gather) {
      test::all_gather(communicator, from, split(to, size, count), kGatherFormat, std::chrono::seconds(60));
    } else if (the_case.kind == Kind::scatter) {
      const auto slots = split(from, size, count);
      reduce_scatter(communicator, std::vector<ConstTensorView>(slots.begin(), slots.end()), to, kFormats, factor,
                     std::chrono::seconds(60));
    } else {
      output = input;
      all_reduce(communicator, to, kFormats, factor, std::chrono::seconds(60));
    }
  });
  return results;
}

// Buffers of one call. In place, they are one.
struct Buffers {
  Buffers(const Case& the_case, int rank, cudaStream_t stream, unsigned seed = 0)
      : the_case_(the_case),
        rank_(static_cast<std::size_t>(rank)),
        memory_((the_case.input_elements() + the_case.output_elements()) * element_size(the_case.dtype)) {
    const Bytes input = input_of(the_case, rank, seed);
    Bytes all(memory_.size());
    std::copy(input.begin(), input.end(), all.begin() + static_cast<std::ptrdiff_t>(from() - memory_.data()));
    memory_.set(all, stream);
  }

  Result call(Comm comm, cudaStream_t stream) const {
    const auto [kind, count, dtype, op, in_place, size] = the_case_;
    const unsigned type = the_case_.type();
    if (kind == Kind::gather) return nccl::ncclAllGather(from(), to(), count, type, comm, stream);
    if (kind == Kind::scatter) return nccl::ncclReduceScatter(from(), to(), count, type, op, comm, stream);
    return nccl::ncclAllReduce(from(), to(), count, type, op, comm, stream);
  }
  Bytes result(cudaStream_t stream) const {
    const Bytes all = memory_.get(stream);
    const auto* begin = all.data() + (to() - memory_.data());
    return {begin, begin + the_case_.output_elements() * element_size(the_case_.dtype)};
  }

 private:
  std::size_t slot_bytes() const { return the_case_.count * element_size(the_case_.dtype); }
  std::uint8_t* from() const {
    return memory_.data() + (the_case_.in_place && the_case_.kind == Kind::gather ? rank_ * slot_bytes() : 0);
  }
  std::uint8_t* to() const {
    if (!the_case_.in_place) return memory_.data() + the_case_.input_elements() * element_size(the_case_.dtype);
    return memory_.data() + (the_case_.kind == Kind::scatter ? rank_ * slot_bytes() : 0);
  }

  const Case the_case_;
  const std::size_t rank_;
  DeviceArray<std::uint8_t> memory_;
};

// Returns each rank's output as NCCL makes it, of float32.
inline std::vector<Bytes> exact(const Case& the_case, unsigned seed = 0) {
  const auto size = static_cast<std::size_t>(the_case.size);
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < the_case.size; ++rank) inputs.push_back(input_of(the_case, rank, seed));
  std::vector<Bytes> results(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (the_case.kind == Kind::gather) {
      for (const Bytes& input : inputs) results[rank].insert(results[rank].end(), input.begin(), input.end());
      continue;
    }
    results[rank].resize(the_case.count * sizeof(float));
    const std::size_t first = the_case.kind == Kind::scatter ? rank * the_case.count : 0;
    for (std::size_t i = 0; i < the_case.count; ++i) {
      float sum = 0;
      for (std::size_t peer = 0; peer < size; ++peer) {
        float value = 0;
        std::memcpy(&value, &inputs[peer][4 * (first + i)], 4);
        sum = peer == 0 ? value : the_case.op == kMax ? std::max(sum, value) : sum + value;
      }
      std::memcpy(&results[rank][4 * i], &sum, 4);
    }
  }
  return results;
}

}  // namespace zcomm::test
