// Calls of a program, with what zcomm's own communicator and NCCL make of them.
#pragma once

#include "calls.hpp"
#include "front_ranks.hpp"

namespace zcomm::test {

inline const HopFormats kFormats = HopFormats::parse("int8:128/int4:128");
inline const BlockFormat kGatherFormat = BlockFormat::parse("int8:256");

using front::Collective;
using Bytes = std::vector<std::uint8_t>;

// Kind of a call, elements of a slot (of the tensor, if it has one slot), type and operation.
struct Case {
  Collective kind;
  std::size_t count;
  DType dtype = DType::float32;
  unsigned op = kSum;
  bool in_place = false;
  int size = 4;
  int root = 1;

  bool has(std::initializer_list<Collective> kinds) const { return std::ranges::find(kinds, kind) != kinds.end(); }
  std::size_t input_elements() const {
    return count * (has({Collective::reduce_scatter, Collective::all_to_all, Collective::scatter}) ? slots() : 1);
  }
  std::size_t output_elements() const {
    return count * (has({Collective::all_gather, Collective::all_to_all, Collective::gather}) ? slots() : 1);
  }
  // A rank that is not the root has one buffer anyway.
  bool is_in_place(int rank) const {
    return in_place && !has({Collective::all_to_all, Collective::message}) &&
           (rank == root || !has({Collective::gather, Collective::scatter}));
  }
  std::size_t slots() const { return static_cast<std::size_t>(size); }
  // Messages are sent to the next rank.
  int next(int rank) const { return (rank + 1) % size; }
  int before(int rank) const { return (rank + size - 1) % size; }
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

// Calls zcomm's own communicator.
inline void call_own(Communicator& communicator, const Case& the_case, TensorView from, TensorView to, unsigned seed) {
  constexpr std::chrono::seconds kTimeout(60);
  const auto count = static_cast<std::int64_t>(the_case.count);
  const int size = communicator.size();
  const float factor = the_case.op == kAverage ? 1.0f / static_cast<float>(size) : 1.0f;
  const auto inputs = [&] {
    const auto slots = split(from, size, count);
    return std::vector<ConstTensorView>(slots.begin(), slots.end());
  };
  const TensorView none{nullptr, 0, the_case.dtype};
  const bool is_root = communicator.rank() == the_case.root;
  std::vector<ConstTensorView> sent(the_case.slots(), none);
  std::vector<TensorView> received(the_case.slots(), none);
  switch (the_case.kind) {
    case Collective::all_gather:
      test::all_gather(communicator, from, split(to, size, count), kGatherFormat, kTimeout);
      break;
    case Collective::reduce_scatter:
      reduce_scatter(communicator, inputs(), to, kFormats, factor, kTimeout);
      break;
    case Collective::all_to_all:
      all_to_all(communicator, inputs(), split(to, size, count), kFormats, kTimeout);
      break;
    case Collective::gather:
      sent[static_cast<std::size_t>(the_case.root)] = from;
      if (is_root) received = split(to, size, count);
      communicator.run(
          *make_exchange(ExchangePlan::gather(communicator.world(), the_case.root, count, the_case.dtype, kFormats)),
          {sent, received}, kTimeout);
      break;
    case Collective::scatter:
      if (is_root) sent = inputs();
      received[static_cast<std::size_t>(the_case.root)] = to;
      communicator.run(
          *make_exchange(ExchangePlan::scatter(communicator.world(), the_case.root, count, the_case.dtype, kFormats)),
          {sent, received}, kTimeout);
      break;
    case Collective::message: {
      const int source = the_case.before(communicator.rank());
      Bytes values = input_of(the_case, source, seed);
      from.data = reinterpret_cast<std::byte*>(values.data());
      const Link link = communicator.topology().link(source, communicator.rank());
      communicator.round_trip(from, kFormats.on(link), to);
      break;
    }
    default:
      if (the_case.kind == Collective::all_reduce || is_root) std::memcpy(to.data, from.data, from.num_bytes());
      if (the_case.kind == Collective::all_reduce) all_reduce(communicator, to, kFormats, factor, kTimeout);
      if (the_case.kind == Collective::broadcast) {
        broadcast(communicator, to, the_case.root, kFormats.inter_node, kTimeout);
      }
  }
}

// Returns each rank's output by zcomm's own communicator, on the CPU.
inline std::vector<Bytes> compressed(const Case& the_case, const std::vector<int>& nodes = {0, 0, 1, 1},
                                     unsigned seed = 0) {
  auto communicators = make_communicators(nodes);
  std::vector<Bytes> results(nodes.size());
  run_ranks(static_cast<int>(nodes.size()), [&](int rank) {
    Bytes input = input_of(the_case, rank, seed);
    Bytes& output = results[static_cast<std::size_t>(rank)];
    output.resize(the_case.output_elements() * element_size(the_case.dtype));
    const auto view = [&](Bytes& bytes, std::size_t elements) {
      return TensorView{reinterpret_cast<std::byte*>(bytes.data()), static_cast<std::int64_t>(elements),
                        the_case.dtype};
    };
    call_own(*communicators[static_cast<std::size_t>(rank)], the_case, view(input, the_case.input_elements()),
             view(output, the_case.output_elements()), seed);
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
    const auto [kind, count, dtype, op, in_place, size, root] = the_case_;
    const unsigned type = the_case_.type();
    switch (kind) {
      case Collective::all_gather:
        return nccl::ncclAllGather(from(), to(), count, type, comm, stream);
      case Collective::reduce_scatter:
        return nccl::ncclReduceScatter(from(), to(), count, type, op, comm, stream);
      case Collective::all_to_all:
        return nccl::ncclAlltoAll(from(), to(), count, type, comm, stream);
      case Collective::broadcast:
        return nccl::ncclBroadcast(from(), to(), count, type, root, comm, stream);
      case Collective::gather:
        return nccl::ncclGather(from(), to(), count, type, root, comm, stream);
      case Collective::scatter:
        return nccl::ncclScatter(from(), to(), count, type, root, comm, stream);
      case Collective::message:
        require_nccl(nccl::ncclGroupStart());
        require_nccl(nccl::ncclSend(from(), count, type, the_case_.next(static_cast<int>(rank_)), comm, stream));
        require_nccl(nccl::ncclRecv(to(), count, type, the_case_.before(static_cast<int>(rank_)), comm, stream));
        return nccl::ncclGroupEnd();
      default:
        return nccl::ncclAllReduce(from(), to(), count, type, op, comm, stream);
    }
  }
  Bytes result(cudaStream_t stream) const {
    const Bytes all = memory_.get(stream);
    const auto* begin = all.data() + (to() - memory_.data());
    return {begin, begin + the_case_.output_elements() * element_size(the_case_.dtype)};
  }

 private:
  std::size_t slot_bytes() const { return the_case_.count * element_size(the_case_.dtype); }
  bool is_in_place() const { return the_case_.is_in_place(static_cast<int>(rank_)); }
  std::uint8_t* from() const {
    const bool is_slot = is_in_place() && the_case_.has({Collective::all_gather, Collective::gather});
    return memory_.data() + (is_slot ? rank_ * slot_bytes() : 0);
  }
  std::uint8_t* to() const {
    if (!is_in_place()) return memory_.data() + the_case_.input_elements() * element_size(the_case_.dtype);
    const bool is_slot = the_case_.has({Collective::reduce_scatter, Collective::scatter});
    return memory_.data() + (is_slot ? rank_ * slot_bytes() : 0);
  }

  const Case the_case_;
  const std::size_t rank_;
  DeviceArray<std::uint8_t> memory_;
};

// Returns each rank's output as NCCL makes it, of float32.
inline std::vector<Bytes> exact(const Case& the_case, unsigned seed = 0) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < the_case.size; ++rank) inputs.push_back(input_of(the_case, rank, seed));
  std::vector<Bytes> results(the_case.slots(), Bytes(the_case.output_elements() * sizeof(float)));
  const std::size_t bytes = the_case.count * sizeof(float);
  const auto root = static_cast<std::size_t>(the_case.root);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const auto copy = [&](std::size_t slot, const Bytes& input, std::size_t first) {
      std::memcpy(&results[rank][slot * bytes], &input[first * bytes], bytes);
    };
    if (the_case.kind == Collective::broadcast) copy(0, inputs[root], 0);
    if (the_case.kind == Collective::scatter) copy(0, inputs[root], rank);
    if (the_case.kind == Collective::message) {
      copy(0, inputs[static_cast<std::size_t>(the_case.before(static_cast<int>(rank)))], 0);
    }
    for (std::size_t peer = 0; peer < results.size(); ++peer) {
      const bool gathers = the_case.kind == Collective::gather && rank == root;
      if (the_case.kind == Collective::all_gather || gathers) copy(peer, inputs[peer], 0);
      if (the_case.kind == Collective::all_to_all) copy(peer, inputs[peer], rank);
    }
    if (!the_case.has({Collective::all_reduce, Collective::reduce_scatter})) continue;
    const std::size_t first = the_case.kind == Collective::reduce_scatter ? rank * the_case.count : 0;
    for (std::size_t i = 0; i < the_case.count; ++i) {
      float sum = 0;
      for (std::size_t peer = 0; peer < results.size(); ++peer) {
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
