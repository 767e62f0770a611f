#include "device_gathers.hpp"

#include <algorithm>
#include <utility>

#include "device_preparation.hpp"
#include "message.hpp"
#include "node_gather.hpp"

namespace zcomm {
namespace {

void end_use(const Resources& r, const Kept& kept) {
  kept.device->end_use(r.stream);
  r.transport.watch([device = kept.device] { return device->finding(); });
}

// Gathers from the owners of slots to their holders in other nodes, then within the nodes.
class DeviceGather final : public Stages {
 public:
  // Takes the prepared gather in `taken`, a list of one.
  DeviceGather(const Resources& r, const DifferencePlan& plan, std::span<const TensorView> slots, Kept& kept,
               std::list<PreparedGather> taken)
      : r_(r),
        plan_(plan),
        kept_(kept),
        device_(*kept.device),
        taken_(std::move(taken)),
        prepared_(taken_.front()),
        node_gather_(r, plan, kept, slots),
        offsets_(aligned_offsets(prepared_.sent)),
        received_(r, static_cast<int>(owners().size()), largest_message(prepared_), kDepth) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return 2; }
  void first_hop(std::int64_t chunk) override;
  // Decodes values and passes them on.
  void second_hop(std::int64_t chunk) override;
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  void end() override;

 private:
  static constexpr int kDepth = 2;  // chunks whose messages have arrived

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
  Kept& kept_;
  const DeviceKept& device_;
  const std::list<PreparedGather> taken_;
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
  run_codec(r_, copies_);
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

void DeviceGather::end() {
  end_use(r_, kept_);
  if (prepared_.stream.handle != r_.stream.handle) device_.make_wait(prepared_.stream);
  kept_.sent_bytes = 0;
  for (const std::size_t size : prepared_.sent) kept_.sent_bytes += kDifferenceHeaderBytes + size;
  kept_.generation = prepared_.base + 1;
}

// Gathers kept values again, within the node.
class DeviceGatherAgain final : public Stages {
 public:
  DeviceGatherAgain(const Resources& r, const DifferencePlan& plan, const Kept& kept, std::span<const TensorView> slots)
      : r_(r), plan_(plan), kept_(kept), device_(*kept.device), node_gather_(r, plan, kept, slots) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

  // Checks values and passes them on.
  void first_hop(std::int64_t chunk) override {
    jobs_.clear();
    for (int slot = 0; slot < r_.world.topology.size(); ++slot) {
      if (plan_.place(slot) < 0) continue;
      const std::size_t number = node_gather_.hash_number(slot, chunk);
      const TensorView values = node_gather_.kept(slot, chunk);
      jobs_.push_back({values, values, device_.hash(number), device_.status(number)});
    }
    {
      const Timed timed(r_.stats.codec_time);
      r_.codec.device_differences()->check(jobs_, r_.stream);
    }
    node_gather_.start(chunk);
  }
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  void end() override { end_use(r_, kept_); }

 private:
  const Resources& r_;
  const DifferencePlan& plan_;
  const Kept& kept_;
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

  bool is_prepared(const Kept& kept) const override { return find(kept) != prepared_.end(); }

  std::unique_ptr<Stages> difference_stages(const Resources& r, const ShardDifference& shard,
                                            std::span<const TensorView> slots) override {
    auto& [plan, values, kept] = shard;
    if (!is_prepared(kept)) prepare(r, {&shard, 1});
    std::list<PreparedGather> taken = take(kept);
    kept.device->check();
    kept.generation = 0;
    kept.device->begin_gather(taken.front().base);
    kept.device->make_wait(r.stream);
    return std::make_unique<DeviceGather>(r, plan, slots, kept, std::move(taken));
  }

  std::unique_ptr<Stages> kept_stages(const Resources& r, const DifferencePlan& plan, const Kept& kept,
                                      std::span<const TensorView> slots) override {
    kept.device->make_wait(r.stream);
    return std::make_unique<DeviceGatherAgain>(r, plan, kept, slots);
  }

 private:
  // Describes a batch in words that ranks compare.
  static std::string describe(std::span<const ShardDifference> shards) {
    std::string text = "prepare";
    for (const ShardDifference& shard : shards) {
      text += " " + shard.plan.description() + " to generation " + std::to_string(shard.kept.generation);
    }
    return text;
  }
  std::list<PreparedGather>::const_iterator find(const Kept& kept) const {
    return std::find_if(prepared_.begin(), prepared_.end(), [&](const PreparedGather& prepared) {
      return kept.device != nullptr && prepared.kept.lock() == kept.device;
    });
  }
  // Returns and removes the prepared gather, if any.
  std::list<PreparedGather> take(const Kept& kept) {
    std::list<PreparedGather> taken;
    if (const auto found = find(kept); found != prepared_.end()) taken.splice(taken.end(), prepared_, found);
    return taken;
  }

  std::list<PreparedGather> prepared_;
  Readback readback_;
};

}  // namespace

std::unique_ptr<DeviceGathers> make_device_gathers() { return std::make_unique<Gathers>(); }

}  // namespace zcomm
