#include "difference_gather.hpp"

#include <utility>

#include "counted.hpp"

namespace zcomm {
namespace {

// Looks for errors in what this call's jobs were given: at once on a CPU, when the jobs are done on a GPU.
void look_for_errors(const Resources& r, const Kept& kept) {
  r.transport.watch([hashes = kept.hashes] { return hashes->finding(); });
}

void end_use(const Resources& r, const Kept& kept) {
  kept.hashes->mark_use(r.stream);
  look_for_errors(r, kept);
}

// Kept values of holders, sent within a node straight into the slots of their peers.
class NodeGather {
 public:
  // Takes this rank's shard if the kept values are the same. If it lies in its slot, that is not written to.
  NodeGather(const Resources& r, const DifferencePlan& plan, const Kept& kept, std::span<const TensorView> slots,
             const std::byte* shard = nullptr)
      : r_(r), plan_(plan), kept_(kept), slots_(slots), shard_(shard) {}

  // Sends each rank's own slot; those of other nodes.
  void start_own(std::int64_t chunk) { own_[chunk] = exchange(chunk, /*own=*/true); }
  void start_others(std::int64_t chunk) { others_[chunk] = exchange(chunk, /*own=*/false); }

  void finish(std::int64_t chunk) {
    copies_.clear();
    for (int slot = 0; slot < r_.world.topology.size(); ++slot) {
      if (plan_.place(slot) < 0 || (slot == plan_.rank() && is_there(slot))) continue;
      const ConstTensorView values = kept(slot, chunk);
      copies_.push_back({{values.data, {}, values.dtype}, slot_values(slot, chunk)});
    }
    {
      const Timed timed(r_.stats.codec_time);
      r_.codec.decode(copies_, r_.stream);
    }
    finish_transfer(r_, own_[chunk], 1);
    finish_transfer(r_, others_[chunk], 1);
  }

 private:
  std::unique_ptr<Transfer> exchange(std::int64_t chunk, bool own) {
    sends_.clear();
    recvs_.clear();
    for (const Move& move : plan_.intra_node_hop().sends) {
      if ((move.slot == plan_.rank()) != own) continue;
      const TensorView values = kept(move.slot, chunk);
      sends_.push_back({move.peer, values.data, values.num_bytes()});
    }
    for (const Move& move : plan_.intra_node_hop().recvs) {
      if ((move.slot == move.peer) != own) continue;
      const TensorView values = slot_values(move.slot, chunk);
      recvs_.push_back({move.peer, values.data, values.num_bytes()});
    }
    return start_transfer(r_, sends_, recvs_, 1);
  }
  bool is_there(int slot) const { return slots_[static_cast<std::size_t>(slot)].data == shard_; }
  TensorView kept(int slot, std::int64_t chunk) const { return kept_chunk(plan_, kept_, slot, chunk).values; }
  TensorView slot_values(int slot, std::int64_t chunk) const {
    return slots_[static_cast<std::size_t>(slot)].slice(plan_.chunk(chunk).begin, plan_.chunk(chunk).count);
  }

  const Resources& r_;
  const DifferencePlan& plan_;
  const Kept& kept_;
  const std::span<const TensorView> slots_;
  const std::byte* shard_;
  Ring<std::unique_ptr<Transfer>, 3> own_;
  Ring<std::unique_ptr<Transfer>, 2> others_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Decode> copies_;
};

// Gathers from the owners of slots to their holders in other nodes, then within the nodes.
class DifferenceGather final : public Stages {
 public:
  DifferenceGather(const Resources& r, const DifferencePlan& plan, Kept& kept, std::span<const TensorView> slots,
                   std::unique_ptr<DifferenceMessages> messages)
      : r_(r),
        plan_(plan),
        kept_(kept),
        messages_(std::move(messages)),
        node_gather_(r, plan, kept, slots, messages_->kept_from),
        received_(r, static_cast<int>(owners().size()), messages_->longest(), kDepth) {
    kept_.generation = 0;
    kept_.hashes->begin_gather(messages_->base);
    kept_.hashes->make_wait(r.stream);
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return 2; }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages have arrived

  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }

  // Sends this rank's values to other nodes, and plain values to the ranks of its node.
  void first_hop(std::int64_t chunk) override {
    sends_.clear();
    recvs_.clear();
    messages_->list(r_, chunk, received_, sends_, recvs_);
    exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
    node_gather_.start_own(chunk);
  }
  // Decodes messages of other nodes, and sends the values to the ranks of its node.
  void second_hop(std::int64_t chunk) override {
    finish_transfer(r_, exchanged_[chunk]);
    decode(chunk);
    if (!jobs_.empty()) look_for_errors(r_, kept_);
    node_gather_.start_others(chunk);
  }
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  void end() override {
    end_use(r_, kept_);
    if (messages_->stream.handle != r_.stream.handle) kept_.hashes->make_wait(messages_->stream);
    kept_.sent_bytes = messages_->sent_bytes;
    kept_.generation = messages_->base + 1;
  }

  void decode(std::int64_t chunk) {
    const Timed timed(r_.stats.codec_time);
    jobs_.clear();
    for (std::size_t i = 0; i < owners().size(); ++i) {
      const std::byte* const message = received_.data(static_cast<int>(i), chunk);
      const KeptChunk kept = kept_chunk(plan_, kept_, owners()[i].slot, chunk);
      jobs_.push_back({message, messages_->received_bytes(i, chunk, message), kept.values, messages_->base, kept.hash,
                       kept.status});
    }
    r_.codec.lossless()->decode(jobs_, r_.stream);
  }

  const Resources& r_;
  const DifferencePlan& plan_;
  Kept& kept_;
  const std::unique_ptr<DifferenceMessages> messages_;
  NodeGather node_gather_;
  const MessageBuffers received_;
  Ring<std::unique_ptr<Transfer>, kDepth> exchanged_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<DecodeDifference> jobs_;
};

// Gathers kept values again, within the node.
class NodeGatherAgain final : public Stages {
 public:
  NodeGatherAgain(const Resources& r, const DifferencePlan& plan, const Kept& kept, std::span<const TensorView> slots)
      : r_(r), plan_(plan), kept_(kept), node_gather_(r, plan, kept, slots) {
    kept_.hashes->make_wait(r.stream);
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  // Checks values and passes them on.
  void first_hop(std::int64_t chunk) override {
    jobs_.clear();
    for (int slot = 0; slot < r_.world.topology.size(); ++slot) {
      if (plan_.place(slot) < 0) continue;
      const KeptChunk kept = kept_chunk(plan_, kept_, slot, chunk);
      jobs_.push_back({kept.values, kept.values, kept.hash, kept.status});
    }
    {
      const Timed timed(r_.stats.codec_time);
      r_.codec.lossless()->check(jobs_, r_.stream);
    }
    look_for_errors(r_, kept_);
    node_gather_.start_own(chunk);
    node_gather_.start_others(chunk);
  }
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  void end() override { end_use(r_, kept_); }

  const Resources& r_;
  const DifferencePlan& plan_;
  const Kept& kept_;
  NodeGather node_gather_;
  std::vector<CheckHash> jobs_;
};

}  // namespace

std::unique_ptr<Stages> difference_stages(const Resources& resources, const DifferencePlan& plan, Kept& kept,
                                          std::span<const TensorView> slots,
                                          std::unique_ptr<DifferenceMessages> messages) {
  return std::make_unique<DifferenceGather>(resources, plan, kept, slots, std::move(messages));
}

std::unique_ptr<Stages> kept_stages(const Resources& resources, const DifferencePlan& plan, const Kept& kept,
                                    std::span<const TensorView> slots) {
  return std::make_unique<NodeGatherAgain>(resources, plan, kept, slots);
}

}  // namespace zcomm
