// Second hop of gathers by differences: sends kept values within a node.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "counted.hpp"
#include "pipeline.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// Kept values of holders, sent within a node straight into the slots of their peers.
class NodeGather {
 public:
  // Takes this rank's `shard` if the kept values are the same. If it lies in its slot, that is not written to.
  NodeGather(const Resources& r, const DifferencePlan& plan, const Kept& kept, std::span<const TensorView> slots,
             const std::byte* shard = nullptr)
      : r_(r), plan_(plan), kept_(kept), slots_(slots), shard_(shard) {}

  TensorView kept(int slot, std::int64_t chunk) const {
    const TensorView whole{kept_.memory.data() + plan_.kept_offset(slot),
                           plan_.slots().lengths[static_cast<std::size_t>(slot)], plan_.slots().dtype};
    return whole.slice(plan_.chunk(chunk).begin, plan_.chunk(chunk).count);
  }
  // Returns the index in Kept::hashes.
  std::size_t hash_number(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(plan_.place(slot) * plan_.num_chunks() + chunk);
  }

  // Sends all slots; or first each rank's own one, then those of other nodes.
  void start(std::int64_t chunk) { others_[chunk] = exchange(chunk, Part::all); }
  void start_own(std::int64_t chunk) { own_[chunk] = exchange(chunk, Part::own); }
  void start_others(std::int64_t chunk) { others_[chunk] = exchange(chunk, Part::others); }

  void finish(std::int64_t chunk) {
    copies_.clear();
    for (int slot = 0; slot < r_.world.topology.size(); ++slot) {
      if (plan_.place(slot) < 0 || (slot == plan_.rank() && is_there(slot))) continue;
      const ConstTensorView values = kept(slot, chunk);
      copies_.push_back({{values.data, {}, values.dtype}, slot_values(slot, chunk)});
    }
    run_codec(r_, copies_);
    if (own_[chunk] != nullptr) finish_transfer(r_, own_[chunk], 1);
    finish_transfer(r_, others_[chunk], 1);
  }

 private:
  enum class Part { all, own, others };

  std::unique_ptr<Transfer> exchange(std::int64_t chunk, Part part) {
    const auto is_in = [part](int slot, int from) {
      return part == Part::all || (slot == from) == (part == Part::own);
    };
    sends_.clear();
    recvs_.clear();
    for (const Move& move : plan_.intra_node_hop().sends) {
      if (!is_in(move.slot, plan_.rank())) continue;
      const TensorView values = kept(move.slot, chunk);
      sends_.push_back({move.peer, values.data, values.num_bytes()});
    }
    for (const Move& move : plan_.intra_node_hop().recvs) {
      if (!is_in(move.slot, move.peer)) continue;
      const TensorView values = slot_values(move.slot, chunk);
      recvs_.push_back({move.peer, values.data, values.num_bytes()});
    }
    return start_transfer(r_, sends_, recvs_, 1);
  }
  bool is_there(int slot) const { return slots_[static_cast<std::size_t>(slot)].data == shard_; }
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

}  // namespace zcomm
