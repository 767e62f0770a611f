// Plans: the steps of one rank in a collective of given lengths, dtype and formats. A plan is made once, tells the cost
// of the call, and can be run repeatedly: see Communicator. It knows no addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zcomm/chunks.hpp"
#include "zcomm/dtype.hpp"
#include "zcomm/topology.hpp"

namespace zcomm {

// Lengths and dtype of all ranks' slots.
struct SlotShape {
  std::vector<std::int64_t> lengths;  // of each rank's slot, in elements; at least one
  DType dtype = DType::float32;

  std::int64_t longest() const;
  bool is_even() const;           // all lengths are equal
  std::string to_string() const;  // "float32[2 x 12]" or "float32[12,7]"
  friend bool operator==(const SlotShape&, const SlotShape&) = default;
};

// Returns the shape of at least one slot.
template <class Views>
SlotShape shape_of(const Views& slots) {
  SlotShape shape{{}, slots.front().dtype};
  shape.lengths.reserve(slots.size());
  for (const auto& slot : slots) shape.lengths.push_back(slot.num_elements);
  return shape;
}

// What gathers and reductions have in common: slots, and chunks of their segments.
template <class Format>
class SlotPlan {
 public:
  const World& world() const { return world_; }
  const Topology& topology() const { return world_.topology; }
  int rank() const { return world_.rank; }
  const SlotShape& slots() const { return slots_; }
  std::span<const Segment<Format>> segments() const { return segments_; }
  // Returns shape and segments in words that ranks compare.
  const std::string& description() const { return description_; }

  // --- For the collective itself

  std::int64_t num_chunks() const { return chunks_.count(); }
  std::span<const Piece<Format>> pieces(std::int64_t chunk) const { return chunks_[chunk]; }

 protected:
  // `segments` cover the longest slot. Chunks are cut at multiples of `granule` elements of a segment. Throws
  // ArgumentError.
  SlotPlan(World world, SlotShape slots, std::span<const Segment<Format>> segments, std::int64_t granule);

  World world_;
  SlotShape slots_;
  std::vector<Segment<Format>> segments_;
  std::string description_;
  Chunks<Format> chunks_;
};

// Plan of an all_gather, and of the gathers from the secondary shards that it fills.
class GatherPlan : public SlotPlan<BlockFormat> {
 public:
  // `in_one_hop` sends from each rank to all others even if two hops are possible; the result is the same.
  GatherPlan(World world, SlotShape slots, GatherSegments segments, bool in_one_hop = false, std::int64_t granule = 1);

  // Tells whether one hop replaces two.
  bool is_in_one_hop() const { return is_in_one_hop_; }
  int num_hops() const { return topology().is_hierarchical() && !is_in_one_hop_ ? 2 : 1; }

  std::array<LinkBytes, 2> bytes_by_hop() const { return {bytes_of(hops_[0]), bytes_of(hops_[1])}; }
  LinkBytes bytes() const { return bytes_of(hops_[0]) + bytes_of(hops_[1]); }

  // Returns the bytes of this rank's secondary shard; the second function, the largest of all ranks.
  std::size_t secondary_bytes() const { return num_held_ * wire_offsets_.back(); }
  std::size_t largest_secondary_bytes() const;
  // Returns the bytes that a gather from secondary shards sends.
  LinkBytes bytes_from_secondary() const { return bytes_of(secondary_hop_); }

  // --- For the collective itself

  std::span<const Hop> hops() const { return hops_; }
  const Hop& secondary_hop() const { return secondary_hop_; }
  // Returns the bytes of a chunk of one slot; the second function, of the longest slot.
  std::size_t num_bytes(int slot, std::int64_t chunk) const;
  std::size_t slot_bytes(std::int64_t chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    return wire_offsets_[i + 1] - wire_offsets_[i];
  }
  // Locates a slot among the wires of a chunk: in rank order or, with two hops, so that those of a local rank lie side
  // by side, the one of the own node first.
  std::size_t offset(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(order_[static_cast<std::size_t>(slot)]) * slot_bytes(chunk);
  }
  // Locates wires in the secondary shard: chunk after chunk, each with its slots in that order.
  bool holds(int slot) const { return places_[static_cast<std::size_t>(slot)] >= 0; }
  std::size_t secondary_offset(int slot, std::int64_t chunk) const {
    return num_held_ * wire_offsets_[static_cast<std::size_t>(chunk)] +
           static_cast<std::size_t>(places_[static_cast<std::size_t>(slot)]) * slot_bytes(chunk);
  }
  // Calls visit(peer, first_slot, num_bytes) for the messages that carry the moves of a hop: wires between two ranks
  // that lie side by side share one. Slots shorter than the longest end a message, so that no gap is sent.
  template <class Visit>
  void for_each_message(std::span<const Move> moves, std::int64_t chunk, Visit&& visit) const {
    for (std::size_t begin = 0, end = 0; begin < moves.size(); begin = end) {
      std::size_t total = num_bytes(moves[begin].slot, chunk);
      for (end = begin + 1; end < moves.size() && follows(moves[end - 1], moves[end], chunk); ++end) {
        total += num_bytes(moves[end].slot, chunk);
      }
      visit(moves[begin].peer, moves[begin].slot, total);
    }
  }

 private:
  LinkBytes bytes_of(const Hop& hop) const;
  // Tells whether the wire of `next` begins where that of `last` ends, on both sides.
  bool follows(const Move& last, const Move& next, std::int64_t chunk) const {
    return last.peer == next.peer && offset(last.slot, chunk) + num_bytes(last.slot, chunk) == offset(next.slot, chunk);
  }

  bool is_in_one_hop_;
  std::int64_t longest_;
  std::vector<std::size_t> wire_offsets_;  // of each chunk in the wires of the longest slot, and their end
  std::array<Hop, 2> hops_;
  Hop secondary_hop_;
  std::vector<int> order_;   // of each rank's slot among the wires of a chunk
  std::vector<int> places_;  // of each rank's slot in the secondary shard; -1: not held
  std::size_t num_held_ = 0;
};

// Plan of an all_gather of 16-bit values by lossless differences (lossless.hpp), and of later gathers within nodes
// from the values that holders keep (Topology::holder()).
class LosslessPlan : public SlotPlan<BlockFormat> {
 public:
  // `segments`, all exact, cut the slots into views of their own; none: a slot is one view. They change no message.
  LosslessPlan(World world, const SlotShape& slots, GatherSegments segments = {});

  // Returns the bytes of a gather whose differences of this rank's shard take `body_bytes`, without headers.
  LinkBytes bytes(std::size_t body_bytes) const;
  // Returns the bytes of a gather of unchanged values.
  LinkBytes bytes_from_secondary() const;

  // Returns the bytes of the values that this rank keeps; the second function, the largest of all ranks.
  std::size_t secondary_bytes() const { return held_.size() * slot_bytes_; }
  std::size_t largest_secondary_bytes() const;

  // --- For the collective itself

  // Returns a chunk of every slot; shorter slots end within it. Chunks are whole tiles, so that cutting does not change
  // their bytes.
  const Piece<BlockFormat>& chunk(std::int64_t number) const { return chunks_[number].front(); }
  // Returns the elements of the longest chunk, which is the first.
  std::int64_t longest_chunk() const { return num_chunks() == 0 ? 0 : chunk(0).count; }
  // Returns the parts of a chunk, each in one segment.
  std::span<const Piece<BlockFormat>> parts(std::int64_t chunk) const {
    return parts_[static_cast<std::size_t>(chunk)];
  }
  const Hop& inter_node_hop() const { return inter_node_hop_; }
  const Hop& intra_node_hop() const { return intra_node_hop_; }
  // Returns the slots that this rank holds, in rank order. Values lie slot after slot.
  const std::vector<int>& held() const { return held_; }
  // Returns the number of a slot among those, -1 if this rank does not hold it.
  int place(int slot) const { return places_[static_cast<std::size_t>(slot)]; }
  std::size_t secondary_offset(int slot) const { return static_cast<std::size_t>(place(slot)) * slot_bytes_; }

 private:
  void cut_at_segments();

  std::vector<std::vector<Piece<BlockFormat>>> parts_;  // by chunk
  Hop inter_node_hop_;
  Hop intra_node_hop_;
  std::size_t slot_bytes_;   // of the longest slot, aligned
  std::vector<int> held_;    // slots
  std::vector<int> places_;  // of each rank's slot
};

// Plan of a reduce_scatter.
class ReducePlan : public SlotPlan<HopFormats> {
 public:
  // `feedback` is the format of error feedback's residual, if any.
  ReducePlan(World world, SlotShape slots, ReduceSegments segments, std::optional<BlockFormat> feedback = {});

  const std::optional<BlockFormat>& feedback() const { return feedback_; }

  std::array<LinkBytes, 2> bytes_by_hop() const;
  LinkBytes bytes() const;
  std::size_t residual_bytes() const { return residual_bytes_; }  // 0 without feedback

  // --- For the collective itself

  const Hop& hop(int number) const { return hops_[static_cast<std::size_t>(number)]; }
  // Returns the wire size of one chunk of one slot on `link`, for values of type `dtype`; the second function, the
  // maximum over the chunks of the longest slot.
  std::size_t num_bytes(int slot, std::int64_t chunk, Link link, DType dtype) const;
  std::size_t largest_bytes(Link link, DType dtype) const;
  std::size_t largest_sum_bytes() const;  // of float32 sums of such a chunk, one wire per piece
  // Locates piece `index` of a chunk of `owner`'s slot in the residual. Exact pieces, and slots outside of
  // Topology::residual_owners(), have none.
  bool has_residual(int owner, BlockFormat format) const {
    return feedback_ && !residual_offsets_[static_cast<std::size_t>(owner)].empty() &&
           format.kind != ElementKind::exact;
  }
  std::size_t residual_offset(int owner, std::int64_t chunk, std::size_t index) const {
    return residual_offsets_[static_cast<std::size_t>(owner)][chunks_.first_piece(chunk) + index];
  }

 private:
  void lay_out_residual(BlockFormat feedback);

  std::optional<BlockFormat> feedback_;
  std::array<Hop, 2> hops_;
  std::vector<std::vector<std::size_t>> residual_offsets_;  // of all pieces, by owner; empty: none
  std::size_t residual_bytes_ = 0;
};

// Plan of an all_reduce of one tensor: a reduce_scatter and an all_gather of its slots, with the same chunks. Slots
// have whole blocks of all formats, so the last ones are short or empty, and no padding is copied.
class AllReducePlan {
 public:
  AllReducePlan(const World& world, std::int64_t num_elements, DType dtype, HopFormats formats,
                std::optional<BlockFormat> feedback = {});

  const ReducePlan& reduce() const { return reduce_; }
  const GatherPlan& gather() const { return gather_; }
  std::int64_t num_elements() const { return num_elements_; }
  const std::string& description() const { return description_; }

  std::array<LinkBytes, 4> bytes_by_hop() const;  // two of the reduce_scatter, then two of the all_gather
  LinkBytes bytes() const { return reduce_.bytes() + gather_.bytes(); }
  std::size_t residual_bytes() const { return reduce_.residual_bytes(); }

 private:
  AllReducePlan(const World& world, const SlotShape& slots, HopFormats formats, std::optional<BlockFormat> feedback);

  std::int64_t num_elements_;
  std::string description_;
  ReducePlan reduce_;
  GatherPlan gather_;
};

}  // namespace zcomm
