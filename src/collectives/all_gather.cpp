#include "all_gather.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "random_seed.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {
namespace {

// Wires of the chunks in progress: one slot per rank, side by side, in the plan's order. Wires that a secondary shard
// holds, if there is one, are there instead.
class GatheredWires {
 public:
  // Takes the secondary shard, if any, and memory for the largest wires of `depth` chunks in progress.
  GatheredWires(const GatherPlan& plan, std::byte* secondary, std::int64_t depth, std::byte* memory)
      : plan_(plan), secondary_(secondary), depth_(depth), slots_bytes_(largest(plan)), base_(memory) {}

  // Returns the bytes of the largest chunk's wires, of all slots.
  static std::size_t largest(const GatherPlan& plan) {
    std::size_t num_bytes = 0;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      num_bytes = std::max(num_bytes, plan.slot_bytes(chunk));
    }
    return num_bytes * plan.slots().lengths.size();
  }

  // Returns the address of the wires of a chunk of `slot`. A gather from secondary shards receives no slot that they
  // hold, so it leaves them as they are.
  std::byte* data(int slot, std::int64_t chunk) const {
    if (secondary_ != nullptr && plan_.holds(slot)) return secondary_ + plan_.secondary_offset(slot, chunk);
    return base_ + static_cast<std::size_t>(chunk % depth_) * slots_bytes_ + plan_.offset(slot, chunk);
  }

  // Lists the messages of a hop.
  void list(const Hop& hop, std::int64_t chunk, std::vector<Send>& sends, std::vector<Recv>& recvs) const {
    sends.clear();
    recvs.clear();
    plan_.for_each_message(hop.sends, chunk, [&](int peer, int first_slot, std::size_t num_bytes) {
      sends.push_back({peer, data(first_slot, chunk), num_bytes});
    });
    plan_.for_each_message(hop.recvs, chunk, [&](int peer, int first_slot, std::size_t num_bytes) {
      recvs.push_back({peer, data(first_slot, chunk), num_bytes});
    });
  }

  // Adds the jobs that decode a chunk into all slots.
  void add_decodes(std::span<const TensorView> slots, std::int64_t chunk, std::vector<Decode>& jobs) const {
    const std::size_t num_slots = plan_.slots().lengths.size();
    const SlotViews views(slots, num_slots);
    for (int slot = 0; slot < static_cast<int>(num_slots); ++slot) {
      const std::byte* message = data(slot, chunk);
      for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
        const TensorView values = views(slot, piece);
        const std::byte* const wire = take_wire(message, piece.format, plan_.slots().dtype, values.num_elements);
        jobs.push_back({{wire, piece.format, plan_.slots().dtype}, values});
      }
    }
  }

 private:
  const GatherPlan& plan_;
  std::byte* secondary_;
  std::int64_t depth_;
  std::size_t slots_bytes_;  // per chunk, of all slots
  std::byte* base_;
};

std::byte* bytes_of(const SecondaryShard* secondary) {
  return secondary == nullptr ? nullptr : secondary->memory.data();
}

class AllGather final : public Stages {
 public:
  AllGather(const Resources& r, const GatherPlan& plan, std::span<const ConstTensorView> shard,
            std::span<const TensorView> slots, SecondaryShard* secondary, std::span<std::byte> wires,
            std::size_t hop_of_call)
      : r_(r),
        plan_(plan),
        secondary_(secondary),
        shard_(shard, 1),
        slots_(slots),
        is_again_(shard.empty()),
        leaves_wires_(!wires.empty()),
        uses_own_all_gather_(plan.num_hops() == 1 && secondary == nullptr && plan.slots().is_even()),
        window_(is_again_ || plan.num_hops() == 2 ? 1 : window_of(r, GatheredWires::largest(plan), plan.num_chunks())),
        hop_of_call_(hop_of_call),
        scratch_(r.workspace, leaves_wires_ ? 0 : GatheredWires::largest(plan) * static_cast<std::size_t>(depth()),
                 r.stream),
        wires_(plan, bytes_of(secondary), leaves_wires_ ? plan.num_chunks() : depth(),
               leaves_wires_ ? wires.data() : scratch_.data()),
        first_hop_(depth()),
        second_hop_(depth()) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return is_again_ ? 1 : plan_.num_hops(); }
  int window() const override { return window_; }
  void begin() override {
    if (secondary_ != nullptr && !is_again_) secondary_->generation = 0;
  }

 private:
  // Returns the chunks in progress. On lanes a chunk is encoded while another is decoded.
  int depth() const {
    const int depth = window_ + num_hops() + (r_.transport.lanes() == nullptr ? 0 : 1);
    return static_cast<int>(std::min<std::int64_t>(depth, plan_.num_chunks()));
  }

  void first_hop(std::int64_t chunk) override {
    if (!is_again_) encode(chunk);
    if (uses_own_all_gather_) {  // equal wires, side by side
      first_hop_[chunk] = start_all_gather(r_, wires_.data(0, chunk), plan_.slot_bytes(chunk), hop_of_call_);
      return;
    }
    wires_.list(is_again_ ? plan_.secondary_hop() : plan_.hops()[0], chunk, sends_, recvs_);
    first_hop_[chunk] = start_transfer(r_, sends_, recvs_, hop_of_call_);
  }

  void encode(std::int64_t chunk) {
    encodes_.clear();
    std::byte* message = wires_.data(plan_.rank(), chunk);
    for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
      const ConstTensorView values = shard_(0, piece);
      std::byte* const wire = take_wire(message, piece.format, values.dtype, values.num_elements);
      encodes_.push_back({values, piece.format, wire, rounding_of(r_, plan_.rank(), piece, piece.format)});
    }
    run_beside(r_, encodes_);
  }

  void second_hop(std::int64_t chunk) override {  // within the node
    finish_transfer(r_, first_hop_[chunk], hop_of_call_);
    wires_.list(plan_.hops()[1], chunk, sends_, recvs_);
    second_hop_[chunk] = start_transfer(r_, sends_, recvs_, hop_of_call_ + 1);
  }

  void finish(std::int64_t chunk) override {
    if (num_hops() == 2) {
      finish_transfer(r_, second_hop_[chunk], hop_of_call_ + 1);
    } else {
      finish_transfer(r_, first_hop_[chunk], hop_of_call_);
    }
    if (secondary_ != nullptr && !is_again_ && chunk == num_chunks() - 1) ++secondary_->generation;
    if (leaves_wires_) return;
    decodes_.clear();
    wires_.add_decodes(slots_, chunk, decodes_);
    run_beside(r_, decodes_);
  }

  const Resources& r_;
  const GatherPlan& plan_;
  SecondaryShard* const secondary_;
  const SlotViews<ConstTensorView> shard_;
  const std::span<const TensorView> slots_;
  const bool is_again_;
  const bool leaves_wires_;
  const bool uses_own_all_gather_;
  const int window_;
  const std::size_t hop_of_call_;
  const Scratch scratch_;
  const GatheredWires wires_;
  Ring<std::unique_ptr<Transfer>> first_hop_;
  Ring<std::unique_ptr<Transfer>> second_hop_;
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<Decode> decodes_;
};

class AllGatherOperation final : public Gather {
 public:
  AllGatherOperation(std::shared_ptr<const GatherPlan> plan, std::shared_ptr<SecondaryShard> secondary)
      : plan_(std::move(plan)), secondary_(std::move(secondary)) {}

  const World& world() const override { return plan_->world(); }
  const std::string& description() const override { return plan_->description(); }
  std::int64_t num_chunks() const override { return plan_->num_chunks(); }
  std::vector<Segment<HopFormats>> segments() const override {
    std::vector<Segment<HopFormats>> segments;
    for (const auto& [num_elements, format] : plan_->segments()) segments.push_back({num_elements, {format, format}});
    return segments;
  }
  std::optional<LinkBytes> bytes(const Arguments& arguments) const override {
    return is_again(arguments) ? plan_->bytes_from_secondary() : plan_->bytes();
  }
  OperationMemory memory() const override {
    return {.secondary = plan_->secondary_bytes(),
            .largest_secondary = plan_->largest_secondary_bytes(),
            .wires = GatheredWires::largest(*plan_) * static_cast<std::size_t>(plan_->num_chunks())};
  }
  GatherPtr bound_to(std::shared_ptr<SecondaryShard> secondary) const override {
    return make_all_gather(plan_, std::move(secondary));
  }
  void decode(const Codec& codec, const Arguments& arguments, StreamView stream) const override {
    const std::vector<TensorView> slots =
        joined_slots(arguments.outputs, plan_->segments(), plan_->slots().lengths.size());
    check_argument(!slots.empty() && shape_of(slots) == plan_->slots(), "outputs: expected slots of ", plan_->slots(),
                   ", got ", shape_of(slots));
    check_wires(*this, arguments.wires);
    const GatheredWires wires(*plan_, bytes_of(secondary_.get()), plan_->num_chunks(), arguments.wires.data());
    std::vector<Decode> jobs;
    for (std::int64_t chunk = 0; chunk < plan_->num_chunks(); ++chunk) {
      wires.add_decodes(arguments.outputs, chunk, jobs);
    }
    codec.decode(jobs, stream);
  }

  void check(const Resources& r, const Arguments& given) const override {
    const std::vector<ConstTensorView> shard = joined_slots(given.inputs, plan_->segments(), 1);
    const std::vector<TensorView> slots = joined_slots(given.outputs, plan_->segments(), plan_->slots().lengths.size());
    Arguments arguments = given;
    arguments.inputs = shard;
    arguments.outputs = slots;
    check_gathered(r, arguments);
    check_apart(r, given.inputs, given.outputs, "shard");
    check_plan(r, *plan_, shape_of(slots));
    if (secondary_ != nullptr) check_secondary(*secondary_, plan_->secondary_bytes());
    if (!is_again(arguments)) return;
    check_argument(secondary_ != nullptr, "inputs: expected a shard, as nothing is kept, got none");
    check_argument(secondary_->generation > 0,
                   "secondary: expected a shard that a gather has filled, got one that is empty");
  }
  std::string signature(const Arguments& arguments, bool) const override {
    if (is_again(arguments)) return "gather_secondary " + plan_->description() + kUnchanged;
    return "all_gather " + plan_->description() +
           (secondary_ != nullptr ? " keeping secondary shards, of weights that may have changed" : "");
  }
  std::vector<int> peers(const Arguments& arguments) const override {
    const auto& [topology, rank, _] = plan_->world();
    if (is_again(arguments)) return topology.node_peers(rank);
    return plan_->is_in_one_hop() ? topology.others(rank) : topology.peers(rank);
  }
  std::unique_ptr<Stages> stages(const Resources& r, const Arguments& arguments) override {
    if (plan_->num_chunks() == 0) {
      if (secondary_ != nullptr && !is_again(arguments)) secondary_->generation = 1;
      return nullptr;
    }
    return all_gather_stages(r, *plan_, arguments.inputs, arguments.outputs, secondary_.get(), arguments.wires);
  }

 private:
  const std::shared_ptr<const GatherPlan> plan_;
  const std::shared_ptr<SecondaryShard> secondary_;
};

}  // namespace

std::unique_ptr<Stages> all_gather_stages(const Resources& resources, const GatherPlan& plan,
                                          std::span<const ConstTensorView> shard, std::span<const TensorView> slots,
                                          SecondaryShard* secondary, std::span<std::byte> wires,
                                          std::size_t hop_of_call) {
  return std::make_unique<AllGather>(resources, plan, shard, slots, secondary, wires, hop_of_call);
}

GatherPtr make_all_gather(std::shared_ptr<const GatherPlan> plan, std::shared_ptr<SecondaryShard> secondary) {
  return std::make_shared<AllGatherOperation>(std::move(plan), std::move(secondary));
}

}  // namespace zcomm
