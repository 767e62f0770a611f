#include "zcomm/trace.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "codec/cuda/capacity.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

using Kind = TraceStep::Kind;

// Returns the number of launches that take at most `most_pieces` each.
std::size_t launches(std::size_t num_pieces, std::size_t most_pieces) {
  return (num_pieces + most_pieces - 1) / most_pieces;
}
// Does so where a launch takes `most_wires`, and pieces have `num_wires` each.
std::size_t launches(std::size_t num_pieces, std::size_t most_pieces, std::size_t num_wires, std::size_t most_wires) {
  return launches(num_pieces, std::clamp(most_wires / num_wires, std::size_t{1}, most_pieces));
}

// Counts the launches of a GPU's codec as if all formats were int8 or int4. Sums of one length are one piece there.
class TracedCodec final : public Codec {
 public:
  explicit TracedCodec(Trace& trace) : trace_(trace) {}

  void encode(std::span<const Encode> jobs, StreamView stream) const override {
    std::size_t& num_bytes = add(launches(jobs.size(), gpu::kEncodePieces), stream);
    for (const Encode& job : jobs) {
      num_bytes += job.values.num_bytes() + wire_bytes(job.format, job.values.dtype, job.values.num_elements);
    }
  }
  void decode(std::span<const Decode> jobs, StreamView stream) const override {
    std::size_t& num_bytes = add(launches(jobs.size(), gpu::kDecodePieces), stream);
    for (const Decode& job : jobs) num_bytes += job.values.num_bytes() + size(job.wire, job.values.num_elements);
  }
  void decode_sum(std::span<const DecodeSum> jobs, StreamView stream) const override {
    std::size_t& num_bytes = add(launches(jobs.size(), gpu::kSumPieces, jobs[0].wires.size(), gpu::kSumWires), stream);
    for (const DecodeSum& job : jobs) {
      num_bytes += job.values.num_bytes();
      for (const Wire& wire : job.wires) num_bytes += size(wire, job.values.num_elements);
    }
  }
  void decode_sum_encode(std::span<const DecodeSumEncode> jobs, StreamView stream) const override {
    std::set<std::int64_t> lengths;
    for (const DecodeSumEncode& job : jobs) lengths.insert(job.num_elements);
    std::size_t& num_bytes =
        add(launches(lengths.size(), gpu::kSumEncodePieces, jobs[0].wires.size(), gpu::kSumEncodeWires), stream);
    for (const DecodeSumEncode& job : jobs) {
      num_bytes += wire_bytes(job.format, DType::float32, job.num_elements);
      for (const Wire& wire : job.wires) num_bytes += size(wire, job.num_elements);
    }
  }

 private:
  static std::size_t size(const Wire& wire, std::int64_t num_elements) {
    return wire_bytes(wire.format, wire.dtype, num_elements);
  }
  // Adds a step, and returns its bytes. Only lanes have a handle.
  std::size_t& add(std::size_t num_launches, StreamView stream) const {
    const bool is_beside = stream.handle != nullptr;
    return trace_.emplace_back(TraceStep{.kind = Kind::codec, .number = num_launches, .is_beside = is_beside})
        .num_bytes;
  }

  Trace& trace_;
};

// A stream that is none.
class TracedLanes final : public Lanes {
 public:
  StreamView fork(StreamView) override { return {this}; }
  void join(StreamView) override {}
};

class TracedTransport final : public Transport {
 public:
  TracedTransport(const World& world, bool grouped, Trace& trace) : world_(world), grouped_(grouped), trace_(trace) {}

  int rank() const override { return world_.rank; }
  int size() const override { return world_.topology.size(); }
  void begin(const std::string&, std::span<const int>, std::chrono::milliseconds, StreamView) override {}
  void abort(const std::string&) noexcept override {}

  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) override {
    const auto moves = [](const auto& message) { return message.num_bytes > 0; };
    for (const Send& send : sends) sent_to(send.peer) += send.num_bytes;
    open_.number += static_cast<std::size_t>(std::ranges::count_if(sends, moves) + std::ranges::count_if(recvs, moves));
    return end_of_start();
  }
  std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) override {
    if (!grouped_) return Transport::all_gather(slots, slot_bytes, stream);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) sent_to(peer) += slot_bytes;
    }
    ++open_.number;
    open_.num_ring_steps += size() - 1;
    return end_of_start();
  }
  void end_group(StreamView) override {
    if (grouped_) close();
  }
  bool is_stream_ordered() const override { return grouped_; }
  Lanes* lanes() override { return grouped_ ? &lanes_ : nullptr; }

 private:
  class TracedTransfer final : public Transfer {
   public:
    TracedTransfer(Trace& trace, std::size_t number) : trace_(trace), number_(number) {}
    void wait(StreamView) override { trace_.push_back({.kind = Kind::wait, .number = number_}); }

   private:
    Trace& trace_;
    std::size_t number_;
  };

  std::size_t& sent_to(int peer) { return open_.sent.on(world_.topology.link(rank(), peer)); }
  std::unique_ptr<Transfer> end_of_start() {
    auto transfer = std::make_unique<TracedTransfer>(trace_, num_transfers_);
    if (!grouped_) close();
    return transfer;
  }
  // Ends a transfer, or the group of several. Those without messages are numbered, too.
  void close() {
    trace_.push_back(std::exchange(open_, {.kind = Kind::transfer}));
    ++num_transfers_;
  }

  const World& world_;
  const bool grouped_;
  Trace& trace_;
  TraceStep open_{.kind = Kind::transfer};
  std::size_t num_transfers_ = 0;
  TracedLanes lanes_;
};

// Addresses without memory, from a first one on.
class NoMemory final : public Workspace {
 public:
  explicit NoMemory(std::uintptr_t first) : next_(first) {}

  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    std::byte* const data = reinterpret_cast<std::byte*>(next_);  // NOLINT(performance-no-int-to-ptr): never read
    next_ += (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return data;
  }
  void release(std::byte*, StreamView) noexcept override {}

  std::uintptr_t next() const { return next_; }

 private:
  static constexpr std::uintptr_t kAlignment = 64;
  std::uintptr_t next_;
};

constexpr std::uintptr_t kScratch = std::uintptr_t{1} << 40;
constexpr std::uintptr_t kTensors = std::uintptr_t{1} << 44;

// Makes slots that lie side by side, in no memory.
std::vector<TensorView> slots_of(const SlotShape& shape, NoMemory& memory) {
  std::vector<TensorView> slots;
  for (const std::int64_t length : shape.lengths) {
    TensorView slot{nullptr, length, shape.dtype};
    slot.data = memory.acquire(slot.num_bytes(), {});
    slots.push_back(slot);
  }
  return slots;
}

// Returns the steps of a call, and adds the bytes of its scratch to `scratch_bytes`, if that is not null.
Trace run(const World& world, Operation& operation, const Arguments& arguments, bool grouped,
          std::size_t* scratch_bytes = nullptr) {
  Trace trace;
  auto scratch = std::make_unique<NoMemory>(kScratch);
  const NoMemory& taken = *scratch;
  Communicator communicator(std::make_unique<TracedTransport>(world, grouped, trace), world.topology,
                            std::make_unique<TracedCodec>(trace), std::move(scratch), world.chunk_bytes);
  communicator.run(operation, arguments, std::chrono::seconds(1));
  if (scratch_bytes != nullptr) *scratch_bytes += taken.next() - kScratch;
  return trace;
}

Trace run_reduce(const ReducePlan& plan, bool grouped, std::size_t* scratch_bytes = nullptr) {
  NoMemory memory(kTensors);
  const std::vector<TensorView> slots = slots_of(plan.slots(), memory);
  const std::vector<ConstTensorView> inputs(slots.begin(), slots.end());
  const TensorView output = slots[static_cast<std::size_t>(plan.rank())];
  return run(plan.world(), *make_reduce_scatter(plan), {inputs, {&output, 1}}, grouped, scratch_bytes);
}

}  // namespace

Trace trace_of(const GatherPlan& plan, bool grouped, bool again) {
  NoMemory memory(kTensors);
  const std::vector<TensorView> slots = slots_of(plan.slots(), memory);
  const ConstTensorView shard = slots[static_cast<std::size_t>(plan.rank())];
  std::shared_ptr<SecondaryShard> secondary;
  if (again) {
    secondary = std::make_shared<SecondaryShard>();
    secondary->memory = {memory.acquire(plan.secondary_bytes(), {}), plan.secondary_bytes()};
    secondary->generation = 1;  // as a gather leaves it
  }
  const OperationPtr gather = make_all_gather(std::make_shared<const GatherPlan>(plan), std::move(secondary));
  Arguments arguments{.inputs = {&shard, again ? 0U : 1U}, .outputs = slots};
  if (const std::size_t num_bytes = gather->memory().wires; plan.is_in_one_chunk()) {
    arguments.wires = {memory.acquire(num_bytes, {}), num_bytes};
  }
  return run(plan.world(), *gather, arguments, grouped);
}

Trace trace_of(const ReducePlan& plan, bool grouped) { return run_reduce(plan, grouped); }

std::size_t scratch_of(const ReducePlan& plan, bool grouped) {
  std::size_t num_bytes = 0;
  run_reduce(plan, grouped, &num_bytes);
  return num_bytes;
}

Trace trace_of(const AllReducePlan& plan, bool grouped) {
  NoMemory memory(kTensors);
  const TensorView tensor = slots_of({{plan.num_elements()}, plan.gather().slots().dtype}, memory).front();
  return run(plan.gather().world(), *make_all_reduce(plan), {{}, {&tensor, 1}}, grouped);
}

Trace trace_of(const ExchangePlan& plan, bool grouped) {
  NoMemory memory(kTensors);
  const std::vector<TensorView> sent = slots_of({plan.sent(), plan.dtype()}, memory);
  const std::vector<TensorView> received = slots_of({plan.received(), plan.dtype()}, memory);
  const std::vector<ConstTensorView> inputs(sent.begin(), sent.end());
  return run(plan.world(), *make_exchange(plan), {inputs, received}, grouped);
}

}  // namespace zcomm
