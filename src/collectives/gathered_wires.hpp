// The wires of a gather: in scratch while their chunk is under way, or in a secondary shard.
#pragma once

#include <span>
#include <vector>

#include "counted.hpp"
#include "message.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// The wires of the chunks that are under way: one slot per rank, side by side, as the transport's own all_gather wants
// them. Those that a secondary shard has, if there is one, are there instead.
class GatheredWires {
 public:
  // `held`: the secondary shard, if there is one; `filled`: the same, if it is to be written. `depth`: chunks that are
  // under way at a time.
  GatheredWires(const Resources& r, const GatherPlan& plan, const std::byte* held, std::byte* filled, int depth)
      : plan_(plan),
        held_(held),
        filled_(filled),
        depth_(depth),
        slots_bytes_(largest(plan)),
        scratch_(r.workspace, slots_bytes_ * static_cast<std::size_t>(depth), r.stream) {}

  // Where the wires of a chunk of `slot` are, and where they are to be written: by this rank or by a receive.
  const std::byte* data(int slot, std::int64_t chunk) const {
    return held_ != nullptr && plan_.holds(slot) ? held_ + plan_.secondary_offset(slot, chunk) : room(slot, chunk);
  }
  std::byte* room(int slot, std::int64_t chunk) const {
    if (filled_ != nullptr && plan_.holds(slot)) return filled_ + plan_.secondary_offset(slot, chunk);
    return scratch_.data() + static_cast<std::size_t>(chunk % depth_) * slots_bytes_ +
           static_cast<std::size_t>(slot) * plan_.slot_bytes(chunk);
  }

  // The messages of a hop.
  void list(const Hop& hop, std::int64_t chunk, std::vector<Send>& sends, std::vector<Recv>& recvs) const {
    sends.clear();
    recvs.clear();
    for (const Move& move : hop.sends) {
      sends.push_back({move.peer, data(move.slot, chunk), plan_.num_bytes(move.slot, chunk)});
    }
    for (const Move& move : hop.recvs) {
      recvs.push_back({move.peer, room(move.slot, chunk), plan_.num_bytes(move.slot, chunk)});
    }
  }

  // Calls visit(slot, values, piece, wire) for the pieces of a chunk of all slots.
  template <class Visit>
  void for_each(std::span<const TensorView> slots, std::int64_t chunk, Visit&& visit) const {
    for (int slot = 0; slot < static_cast<int>(slots.size()); ++slot) {
      MessageReader message(data(slot, chunk), plan_.slots().dtype);
      for (const Piece<BlockFormat>& piece : plan_.pieces(chunk)) {
        const TensorView values = slots[static_cast<std::size_t>(slot)].slice(piece.begin, piece.count);
        visit(slot, values, piece, message.next(piece.format, values.num_elements));
      }
    }
  }

  // Fills all slots with the values of a chunk. `jobs` is scratch, kept from chunk to chunk.
  void decode(const Resources& r, std::span<const TensorView> slots, std::int64_t chunk,
              std::vector<Decode>& jobs) const {
    jobs.clear();
    for_each(slots, chunk, [&](int, TensorView values, const Piece<BlockFormat>&, const Wire& wire) {
      jobs.push_back({wire, values});
    });
    const Timed timed(r.stats.codec_time);
    r.codec.decode(jobs, r.stream);
  }

 private:
  static std::size_t largest(const GatherPlan& plan) {
    std::size_t num_bytes = 0;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      num_bytes = std::max(num_bytes, plan.slot_bytes(chunk));
    }
    return num_bytes * plan.slots().lengths.size();
  }

  const GatherPlan& plan_;
  const std::byte* held_;
  std::byte* filled_;
  int depth_;
  std::size_t slots_bytes_;  // of a chunk of all slots
  Scratch scratch_;
};

}  // namespace zcomm
