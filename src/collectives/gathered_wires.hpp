// Wires of a gather: in scratch memory during their chunk, in memory of the caller, or in a secondary shard.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "counted.hpp"
#include "message.hpp"
#include "slot_views.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// Wires of the chunks in progress: one slot per rank, side by side, in the plan's order. Wires that a secondary shard
// holds, if there is one, are there instead.
class GatheredWires {
 public:
  // Takes the secondary shard, if any: `held` for reading, and `filled` if it is to be written. `depth` is the number
  // of chunks in progress. `all` has room for those of all chunks; empty: they are scratch.
  GatheredWires(const Resources& r, const GatherPlan& plan, const std::byte* held, std::byte* filled, int depth,
                std::span<std::byte> all)
      : GatheredWires(plan, held, filled, all) {
    if (!all.empty()) return;
    depth_ = depth;
    scratch_.emplace(r.workspace, slots_bytes_ * static_cast<std::size_t>(depth), r.stream);
    base_ = scratch_->data();
  }
  GatheredWires(const GatherPlan& plan, const std::byte* held, std::byte* filled, std::span<std::byte> all)
      : plan_(plan),
        held_(held),
        filled_(filled),
        depth_(plan.num_chunks()),
        slots_bytes_(largest(plan)),
        base_(all.data()) {}

  // Returns the bytes of the largest chunk's wires, of all slots.
  static std::size_t largest(const GatherPlan& plan) {
    std::size_t num_bytes = 0;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      num_bytes = std::max(num_bytes, plan.slot_bytes(chunk));
    }
    return num_bytes * plan.slots().lengths.size();
  }

  // Returns the address of the wires of a chunk of `slot`; the second function, for writing by this rank or a receive.
  const std::byte* data(int slot, std::int64_t chunk) const {
    return held_ != nullptr && plan_.holds(slot) ? held_ + plan_.secondary_offset(slot, chunk) : room(slot, chunk);
  }
  std::byte* room(int slot, std::int64_t chunk) const {
    if (filled_ != nullptr && plan_.holds(slot)) return filled_ + plan_.secondary_offset(slot, chunk);
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
      recvs.push_back({peer, room(first_slot, chunk), num_bytes});
    });
  }

  // Decodes a chunk into all slots. `jobs` is a buffer reused by all chunks.
  void decode(const Resources& r, std::span<const TensorView> slots, std::int64_t chunk,
              std::vector<Decode>& jobs) const {
    jobs.clear();
    add_decodes(slots, chunk, jobs);
    run_codec(r, jobs);
  }
  void add_decodes(std::span<const TensorView> slots, std::int64_t chunk, std::vector<Decode>& jobs) const {
    const std::size_t num_slots = plan_.slots().lengths.size();
    const SlotViews views(slots, num_slots);
    for (int slot = 0; slot < static_cast<int>(num_slots); ++slot) {
      MessageReader message(data(slot, chunk), plan_.slots().dtype);
      for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
        const TensorView values = views(slot, piece);
        jobs.push_back({message.next(piece.format, values.num_elements), values});
      }
    }
  }

 private:
  const GatherPlan& plan_;
  const std::byte* held_;
  std::byte* filled_;
  std::int64_t depth_;
  std::size_t slots_bytes_;  // per chunk, of all slots
  std::optional<Scratch> scratch_;
  std::byte* base_;
};

}  // namespace zcomm
