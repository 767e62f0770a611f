#include "device_gathers.hpp"

#include <algorithm>

#include "device_preparation.hpp"
#include "message.hpp"
#include "node_gather.hpp"

namespace zcomm {
namespace {

// From the owners of slots to their holders in other nodes, then inside the nodes.
class DeviceGather final : public Stages {
 public:
  DeviceGather(const Resources& r, const DifferencePlan& plan, std::span<const TensorView> slots,
               const KeptShards& kept, const PreparedGather& prepared)
      : r_(r),
        plan_(plan),
        device_(*kept.device),
        prepared_(prepared),
        node_gather_(r, plan, kept, slots),
        offsets_(aligned_offsets(prepared.sent)),
        received_(r, static_cast<int>(owners().size()), largest_message(prepared), kDepth) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return 2; }
  void first_hop(std::int64_t chunk) override;
  // Decodes, and hands on.
  void second_hop(std::int64_t chunk) override;
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages are there

  static std::size_t largest_message(const PreparedGather& prepared) {
    std::size_t largest = 0;
    for (const std::size_t size : prepared.received) largest = std::max(largest, align_wire(size));
    return kDifferenceHeaderBytes + largest;
  }
  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }
  std::size_t received_bytes(std::size_t owner, std::int64_t chunk) const {
    return prepared_.received[owner * static_cast<std::size_t>(plan_.num_chunks()) + static_cast<std::size_t>(chunk)];
  }

  const Resources& r_;
  const DifferencePlan& plan_;
  const DeviceKept& device_;
  const PreparedGather& prepared_;
  NodeGather node_gather_;
  const std::vector<std::size_t> offsets_;
  const MessageBuffers received_;  // headers and bodies
  Ring<std::unique_ptr<Transfer>, kDepth> exchanged_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Decode> copies_;
  std::vector<DecodeDifference> jobs_;
};

void DeviceGather::first_hop(std::int64_t chunk) {
  const auto number = static_cast<std::size_t>(chunk);
  sends_.clear();
  recvs_.clear();
  copies_.clear();
  for (const Move& move : plan_.inter_node_hop().sends) {
    sends_.push_back({move.peer, prepared_.bodies->data() + offsets_[number], prepared_.sent[number]});
  }
  for (std::size_t i = 0; i < owners().size(); ++i) {
    std::byte* const message = received_.data(static_cast<int>(i), chunk);
    const std::byte* const header =
        prepared_.headers->row(1 + i) + (prepared_.first_header + number) * kDifferenceHeaderBytes;
    copies_.push_back(copy_of(header, message, kDifferenceHeaderBytes));
    recvs_.push_back({owners()[i].peer, message + kDifferenceHeaderBytes, received_bytes(i, chunk)});
  }
  r_.codec.decode(copies_, r_.stream);
  exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
}

void DeviceGather::second_hop(std::int64_t chunk) {
  finish_transfer(r_, exchanged_[chunk]);
  jobs_.clear();
  for (std::size_t i = 0; i < owners().size(); ++i) {
    const int slot = owners()[i].slot;
    const std::size_t number = node_gather_.hash_number(slot, chunk);
    jobs_.push_back({received_.data(static_cast<int>(i), chunk), kDifferenceHeaderBytes + received_bytes(i, chunk),
                     node_gather_.kept(slot, chunk), prepared_.base, device_.hash(number), device_.status(number)});
  }
  {
    const Timed timed(r_.stats.codec_time);
    if (!jobs_.empty()) r_.codec.device_differences()->decode(jobs_, r_.stream);
  }
  node_gather_.start(chunk);
}

// Inside a node, of what is kept.
class DeviceGatherAgain final : public Stages {
 public:
  DeviceGatherAgain(const Resources& r, const DifferencePlan& plan, const KeptShards& kept,
                    std::span<const TensorView> slots)
      : r_(r), plan_(plan), device_(*kept.device), node_gather_(r, plan, kept, slots) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

  // Checks, and hands on.
  void first_hop(std::int64_t chunk) override {
    jobs_.clear();
    for (int slot = 0; slot < r_.topology.size(); ++slot) {
      if (plan_.place(slot) < 0) continue;
      const std::size_t number = node_gather_.hash_number(slot, chunk);
      jobs_.push_back({node_gather_.kept(slot, chunk), device_.hash(number), device_.status(number)});
    }
    {
      const Timed timed(r_.stats.codec_time);
      r_.codec.device_differences()->check(jobs_, r_.stream);
    }
    node_gather_.start(chunk);
  }
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }

 private:
  const Resources& r_;
  const DifferencePlan& plan_;
  const DeviceKept& device_;
  NodeGather node_gather_;
  std::vector<CheckHash> jobs_;
};

class Gathers final : public DeviceGathers {
 public:
  void prepare(const Resources& r, std::span<const ShardDifference> shards) override {
    prepared_.remove_if([](const PreparedGather& prepared) { return prepared.kept.expired(); });
    for (const ShardDifference& shard : shards) {
      if (shard.kept.device == nullptr) shard.kept.device = std::make_shared<DeviceKept>(shard.plan);
      if (!take(shard.kept).empty()) shard.kept.generation = 0;
    }
    prepared_.splice(prepared_.end(), prepare_gathers(r, shards, describe(shards), readback_));
  }

  bool is_prepared(const KeptShards& kept) const override { return find(kept) != prepared_.end(); }

  void all_gather(const Resources& r, const ShardDifference& shard, std::span<const TensorView> slots) override {
    auto& [plan, values, kept] = shard;
    if (!is_prepared(kept)) prepare(r, {&shard, 1});
    const std::list<PreparedGather> taken = take(kept);
    const PreparedGather& prepared = taken.front();
    kept.device->check();
    kept.generation = 0;
    kept.device->begin_gather(prepared.base);
    kept.device->make_wait(r.stream);
    DeviceGather gather(r, plan, slots, kept, prepared);
    run_pipeline(r, gather);
    finish(r, kept);
    if (prepared.stream.handle != r.stream.handle) kept.device->make_wait(prepared.stream);
    kept.sent_bytes = 0;
    for (const std::size_t size : prepared.sent) kept.sent_bytes += kDifferenceHeaderBytes + size;
    kept.generation = prepared.base + 1;
  }

  void gather_secondary(const Resources& r, const DifferencePlan& plan, const KeptShards& kept,
                        std::span<const TensorView> slots) override {
    kept.device->make_wait(r.stream);
    DeviceGatherAgain gather(r, plan, kept, slots);
    run_pipeline(r, gather);
    finish(r, kept);
  }

 private:
  // What ranks compare.
  static std::string describe(std::span<const ShardDifference> shards) {
    std::string text = "prepare";
    for (const ShardDifference& shard : shards) {
      text += " " + shard.plan.description() + " to generation " + std::to_string(shard.kept.generation);
    }
    return text;
  }
  std::list<PreparedGather>::const_iterator find(const KeptShards& kept) const {
    return std::find_if(prepared_.begin(), prepared_.end(), [&](const PreparedGather& prepared) {
      return kept.device != nullptr && prepared.kept.lock() == kept.device;
    });
  }
  // It, or nothing.
  std::list<PreparedGather> take(const KeptShards& kept) {
    std::list<PreparedGather> taken;
    if (const auto found = find(kept); found != prepared_.end()) taken.splice(taken.end(), prepared_, found);
    return taken;
  }
  static void finish(const Resources& r, const KeptShards& kept) {
    kept.device->end_use(r.stream);
    r.transport.watch([device = kept.device] { return device->finding(); });
  }

  std::list<PreparedGather> prepared_;
  Readback readback_;
};

}  // namespace

std::unique_ptr<DeviceGathers> make_device_gathers() { return std::make_unique<Gathers>(); }

}  // namespace zcomm
