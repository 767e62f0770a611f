// A GPU that only tells the time: a codec, a transport and scratch for the collectives' own code, which move no byte.
//
// One rank stands for all: every rank does the same at the same time, so that a transfer starts when this rank starts
// it. There are three clocks, that of the host, of the caller's stream and of the transport's stream. What the host
// queues starts on a stream when the host has queued it and the stream has done what came before.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm::model {

// What is assumed. Times in seconds; rates in bytes, or instructions of a thread, per second.
struct Assumptions {
  // The host: to queue a kernel, an event, an NCCL group (a thread that NCCL starts and the caller joins), a message.
  double launch_host = 4e-6;
  double event_host = 0.5e-6;
  double group_host = 50e-6;
  double message_host = 0.3e-6;
  // The device: before the first byte of a kernel, or of NCCL's kernel, moves; more for each peer, or over a network.
  double kernel_start = 3e-6;
  double group_start = 15e-6;
  double peer_start = 0.5e-6;
  double network_start = 15e-6;
  // A step of a ring, for NCCL's exact collectives, inside a node and between nodes; and to launch them.
  double ring_step = 2e-6;
  double network_ring_step = 8e-6;
  double exact_start = 20e-6;
  // What kernels reach of an H100: 70 % of 3.35 TB/s, 60 % of 132 x 4 warps x 1.755 GHz.
  double memory_rate = 0.7 * 3.35e12;
  double instruction_rate = 0.6 * 132 * 4 * 32 * 1.755e9;
  // Instructions per element: what bench/kernel_listing.py counts. Those of a
  // sum are a constant and a part for each wire.
  double encode_instructions = 7.8;
  double decode_instructions = 4.5;
  double sum_instructions = 8;
  double sum_encode_instructions = 12;
  double wire_instructions = 3.7;
  // The share of a link that large messages reach.
  double intra_share = 0.8;
  double inter_share = 0.85;
};

struct Machine {
  std::string name;
  int nodes;
  int ranks_per_node;
  double intra_rate;  // bytes per second of a GPU to the others of its node, one direction
  double inter_rate;  // of a GPU's share of the network, one direction; 0 for one node

  int size() const { return nodes * ranks_per_node; }
  Topology topology() const {
    std::vector<int> ids;
    for (int rank = 0; rank < size(); ++rank) ids.push_back(rank / ranks_per_node);
    return Topology(ids);
  }
};

// Shared by all parts of a simulated GPU. Seconds since the call began.
struct Clock {
  Assumptions assumed;
  double host = 0;
  double stream = 0;     // of the caller
  double transport = 0;  // the stream of the transport
  int num_kernels = 0;
  int num_groups = 0;
  std::size_t most_messages = 0;  // sends and receives of a group

  double end() const { return std::max(host, stream); }
};

// Bytes and instructions of a launch.
struct Load {
  double bytes = 0;
  double instructions = 0;
};

class SimulatedCodec final : public Codec {
 public:
  explicit SimulatedCodec(std::shared_ptr<Clock> clock) : clock_(std::move(clock)) {}

  void encode(std::span<const Encode> jobs, StreamView) const override {
    Load load;
    for (const Encode& job : jobs) {
      load.bytes += values_bytes(job.values) + wire_size(job.format, job.values.dtype, job.values.num_elements);
      load.instructions += clock_->assumed.encode_instructions * static_cast<double>(job.values.num_elements);
    }
    launch(load, jobs.size());
  }
  void decode(std::span<const Decode> jobs, StreamView) const override {
    Load load;
    for (const Decode& job : jobs) {
      load.bytes += values_bytes(job.values) + wire_size(job.wire.format, job.wire.dtype, job.values.num_elements);
      load.instructions += clock_->assumed.decode_instructions * static_cast<double>(job.values.num_elements);
    }
    launch(load, jobs.size());
  }
  void decode_sum(std::span<const DecodeSum> jobs, StreamView) const override {
    Load load;
    for (const DecodeSum& job : jobs) {
      load.bytes += values_bytes(job.values);
      add_wires(load, job.wires, job.values.num_elements, clock_->assumed.sum_instructions);
    }
    launch(load, jobs.size());
  }
  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView) const override {
    Load load;
    for (const DecodeSumEncode& job : jobs) {
      load.bytes += wire_size(job.format, DType::float32, job.num_elements);
      add_wires(load, job.wires, job.num_elements, clock_->assumed.sum_encode_instructions);
    }
    launch(load, jobs.size());
  }

 private:
  static double values_bytes(ConstTensorView values) { return static_cast<double>(values.num_bytes()); }
  static double wire_size(BlockFormat format, DType dtype, std::int64_t num_elements) {
    return static_cast<double>(wire_bytes(format, dtype, num_elements));
  }
  void add_wires(Load& load, std::span<const Wire> wires, std::int64_t num_elements, double instructions) const {
    for (const Wire& wire : wires) load.bytes += wire_size(wire.format, wire.dtype, num_elements);
    load.instructions += (instructions + clock_->assumed.wire_instructions * static_cast<double>(wires.size())) *
                         static_cast<double>(num_elements);
  }
  // The jobs of a call are one launch, as far as they fit its parameters.
  void launch(const Load& load, std::size_t num_jobs) const {
    constexpr std::size_t kJobsPerLaunch = 64;
    for (std::size_t begun = 0; begun < num_jobs; begun += kJobsPerLaunch) {
      clock_->host += clock_->assumed.launch_host;
      clock_->stream = std::max(clock_->stream, clock_->host) + clock_->assumed.kernel_start;
      ++clock_->num_kernels;
    }
    clock_->stream +=
        std::max(load.bytes / clock_->assumed.memory_rate, load.instructions / clock_->assumed.instruction_rate);
  }

  std::shared_ptr<Clock> clock_;
};

// As NcclTransport: one group at a time, on a stream of its own, behind the caller's.
class SimulatedTransport final : public Transport {
 public:
  SimulatedTransport(const Machine& machine, std::shared_ptr<Clock> clock)
      : machine_(machine), topology_(machine.topology()), clock_(std::move(clock)) {}

  int rank() const override { return 0; }
  int size() const override { return machine_.size(); }
  void begin(const std::string&, std::span<const int>, std::chrono::milliseconds) override {}
  void abort(const std::string&) noexcept override {}

  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) override {
    for (const Send& send : sends) add(send.peer, send.num_bytes);
    num_messages_ += sends.size() + recvs.size();
    return std::make_unique<SimulatedTransfer>(*this, group_);
  }
  std::unique_ptr<Transfer> all_gather(std::byte*, std::size_t slot_bytes, StreamView) override {
    for (int peer = 1; peer < size(); ++peer) add(peer, slot_bytes);
    num_messages_ += 1;
    ring_steps_ += size() - 1;
    return std::make_unique<SimulatedTransfer>(*this, group_);
  }
  void begin_group() override {
    intra_bytes_ = inter_bytes_ = 0;
    num_messages_ = 0;
    ring_steps_ = 0;
    ++group_;
    ends_.push_back(0);
  }
  void end_group(StreamView) override;
  bool starts_at_once() const override { return false; }

 private:
  class SimulatedTransfer final : public Transfer {
   public:
    SimulatedTransfer(SimulatedTransport& transport, std::size_t group) : transport_(transport), group_(group) {}
    void wait(StreamView) override {
      Clock& clock = *transport_.clock_;
      clock.host += clock.assumed.event_host;
      clock.stream = std::max(clock.stream, transport_.ends_[group_ - 1]);
    }

   private:
    SimulatedTransport& transport_;
    std::size_t group_;
  };

  void add(int peer, std::size_t num_bytes) {
    const bool is_intra = topology_.link(0, peer) == Link::intra_node;
    (is_intra ? intra_bytes_ : inter_bytes_) += static_cast<double>(num_bytes);
  }

  const Machine machine_;
  const Topology topology_;
  std::shared_ptr<Clock> clock_;
  double intra_bytes_ = 0;  // of the open group
  double inter_bytes_ = 0;
  std::size_t num_messages_ = 0;
  int ring_steps_ = 0;
  std::size_t group_ = 0;     // number of the open one, from 1
  std::vector<double> ends_;  // of each
};

inline void SimulatedTransport::end_group(StreamView) {
  if (num_messages_ == 0) return;
  const Assumptions& assumed = clock_->assumed;
  ++clock_->num_groups;
  clock_->most_messages = std::max(clock_->most_messages, num_messages_);
  // An event on either side of the group.
  clock_->host +=
      2 * assumed.event_host + assumed.group_host + assumed.message_host * static_cast<double>(num_messages_);
  double start = assumed.group_start + assumed.peer_start * static_cast<double>(num_messages_) / 2;
  if (inter_bytes_ > 0) start += assumed.network_start;
  start += assumed.ring_step * ring_steps_;
  double moving = intra_bytes_ / (machine_.intra_rate * assumed.intra_share);
  if (inter_bytes_ > 0) moving = std::max(moving, inter_bytes_ / (machine_.inter_rate * assumed.inter_share));
  clock_->transport = std::max({clock_->transport, clock_->host, clock_->stream}) + start + moving;
  ends_.back() = clock_->transport;
}

// Addresses without memory.
class NoMemory final : public Workspace {
 public:
  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    std::byte* const data = reinterpret_cast<std::byte*>(next_);
    next_ += (num_bytes + 4095) / 4096 * 4096;
    return data;
  }
  void release(std::byte*, StreamView) noexcept override {}

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 40;
};

// The last one: the reduce_scatter and the all_gather that an all_reduce consists of, as two calls.
enum class Kind { all_gather, reduce_scatter, all_reduce, all_reduce_in_turn };

// The clocks after a call on `num_bytes` of bfloat16 in the default formats; all_reduce takes those of reduce_scatter.
inline Clock simulate(const Machine& machine, Kind kind, std::size_t num_bytes, std::size_t chunk_bytes,
                      const Assumptions& assumed = {}) {
  const auto clock = std::make_shared<Clock>();
  clock->assumed = assumed;
  Communicator communicator(std::make_unique<SimulatedTransport>(machine, clock), machine.topology(),
                            std::make_unique<SimulatedCodec>(clock), std::make_unique<NoMemory>(), chunk_bytes);
  const auto elements = static_cast<std::int64_t>(num_bytes / element_size(DType::bfloat16));
  const std::int64_t shard = (elements + machine.size() - 1) / machine.size();
  std::byte* const data = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44);
  constexpr std::chrono::seconds kTimeout(1);
  const auto slots = split(TensorView{data, shard * machine.size(), DType::bfloat16}, machine.size(), shard);
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const HopFormats formats = HopFormats::parse("int8:128/int4:128");
  const auto gather = [&](BlockFormat format) { test::all_gather(communicator, slots[0], slots, format, kTimeout); };
  const auto scatter = [&] { test::reduce_scatter(communicator, inputs, slots[0], formats, 1, kTimeout); };
  switch (kind) {
    case Kind::all_gather:
      gather(BlockFormat::parse("int8:256"));
      break;
    case Kind::reduce_scatter:
      scatter();
      break;
    case Kind::all_reduce:
      test::all_reduce(communicator, {data, shard * machine.size(), DType::bfloat16}, formats, 1, kTimeout);
      break;
    case Kind::all_reduce_in_turn:
      scatter();
      gather(formats.intra_node);
      break;
  }
  return *clock;
}

// Seconds of NCCL's own call on as many bytes: a ring over all GPUs, each of which has its share of the network.
inline double exact_seconds(const Machine& machine, std::size_t num_bytes, const Assumptions& assumed = {}) {
  const double share = static_cast<double>(machine.size() - 1) / machine.size() * static_cast<double>(num_bytes);
  double seconds = share / (machine.intra_rate * assumed.intra_share);
  double latency = (machine.size() - machine.nodes) * assumed.ring_step;
  if (machine.nodes > 1) {
    // As many rings as a node has GPUs, each over another one's share of the network.
    seconds = std::max(seconds, share / machine.ranks_per_node / (machine.inter_rate * assumed.inter_share));
    latency += machine.nodes * assumed.network_ring_step;
  }
  return assumed.exact_start + latency + seconds;
}

}  // namespace zcomm::model
