// Plans: the steps of one rank in a collective of given lengths, dtype and formats. A plan is made once, computes the
// cost of a call, and can be run repeatedly: see Communicator. It knows no addresses. It is immutable, so threads may
// share it.
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
  std::vector<std::int64_t> lengths;  // of each rank's slot, in elements; at least one length
  DType dtype = DType::float32;       // of all slots

  // Returns the length of the longest slot, in elements.
  std::int64_t longest() const;

  // Returns true if all lengths are equal.
  bool is_even() const;

  // Returns a text for messages: "float32[2 x 12]", or "float32[12,7]" if lengths differ.
  std::string to_string() const;
  friend bool operator==(const SlotShape&, const SlotShape&) = default;
};

// Returns the shape of slots: the length of each view, and the dtype of the first one. Requires at least one view.
template <class Views>
SlotShape shape_of(const Views& slots) {
  SlotShape shape{{}, slots.front().dtype};
  shape.lengths.reserve(slots.size());
  for (const auto& slot : slots) shape.lengths.push_back(slot.num_elements);
  return shape;
}

// The common part of plans of gathers and reductions: slots, and chunks of their segments.
//
// The constructor of every plan throws ArgumentError if the world is not valid, or if `slots` does not have one length
// per rank. It throws it if a length is negative, or if the segments do not add up to the longest slot.
// It also throws it if a format is not valid or does not take the dtype of the slots.
template <class Format>
class SlotPlan {
 public:
  // Returns the world that the plan was made for.
  const World& world() const { return world_; }

  // Returns the nodes of the group.
  const Topology& topology() const { return world_.topology; }

  // Returns the rank that the plan was made for.
  int rank() const { return world_.rank; }

  // Returns the shape of the slots. A call must have the same shape.
  const SlotShape& slots() const { return slots_; }

  // Returns the segments of a slot.
  std::span<const Segment<Format>> segments() const { return segments_; }

  // Returns shape and segments in words that ranks compare.
  const std::string& description() const { return description_; }

  // Returns the number of chunks of a call; 0 if all slots are empty.
  std::int64_t num_chunks() const { return chunks_.count(); }

  // Returns the pieces of a chunk. Only the collective needs them.
  std::span<const Piece<Format>> pieces(std::int64_t chunk) const { return chunks_[chunk]; }

 protected:
  // Cuts chunks at multiples of `granule` elements of a segment. `segments` must cover the longest slot.
  // A call makes `most_hops` hops if it can; with 0, only World::chunk_bytes cuts the slots.
  SlotPlan(World world, SlotShape slots, std::span<const Segment<Format>> segments, std::int64_t granule,
           int most_hops = 2);

  World world_;
  SlotShape slots_;
  std::vector<Segment<Format>> segments_;
  std::string description_;
  Chunks<Format> chunks_;
};

// Plan of an all_gather, and of the gathers from the secondary shards that it fills: see make_all_gather().
class GatherPlan : public SlotPlan<BlockFormat> {
 public:
  // Plans a gather of `slots` in the formats of `segments`, which is copied.
  // With `in_one_hop`, each rank sends to all others even if two hops are possible. The result is the same.
  // Pieces that do not end their segment have a multiple of `granule` elements.
  // With `in_one_chunk`, only World::chunk_bytes cuts the slots: for a gather that leaves its wires, which has memory
  // for all of them.
  GatherPlan(World world, SlotShape slots, GatherSegments segments, bool in_one_hop = false, std::int64_t granule = 1,
             bool in_one_chunk = false);

  // Returns true if only World::chunk_bytes cuts the slots.
  bool is_in_one_chunk() const { return is_in_one_chunk_; }

  // Returns true if one hop replaces two.
  bool is_in_one_hop() const { return is_in_one_hop_; }

  // Returns the number of hops, 1 or 2.
  int num_hops() const { return topology().is_hierarchical() && !is_in_one_hop_ ? 2 : 1; }

  // Returns the bytes that this rank sends in each hop.
  std::array<LinkBytes, 2> bytes_by_hop() const { return {bytes_of(hops_[0]), bytes_of(hops_[1])}; }

  // Returns the bytes that this rank sends in a call.
  LinkBytes bytes() const { return bytes_of(hops_[0]) + bytes_of(hops_[1]); }

  // Returns the bytes of this rank's secondary shard.
  std::size_t secondary_bytes() const { return num_held_ * wire_offsets_.back(); }

  // Returns the bytes of the largest secondary shard of any rank.
  std::size_t largest_secondary_bytes() const;

  // Returns the bytes that this rank sends in a gather from secondary shards.
  LinkBytes bytes_from_secondary() const { return bytes_of(secondary_hop_); }

  // --- Internal: for the stages of the collective. A caller needs nothing below in this class.

  // Returns the two hops; the second is empty if there is one.
  std::span<const Hop> hops() const { return hops_; }

  // Returns the hop of a gather from secondary shards.
  const Hop& secondary_hop() const { return secondary_hop_; }

  // Returns the wire bytes of a chunk of one slot.
  std::size_t num_bytes(int slot, std::int64_t chunk) const;

  // Returns the wire bytes of a chunk of the longest slot.
  std::size_t slot_bytes(std::int64_t chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    return wire_offsets_[i + 1] - wire_offsets_[i];
  }

  // Returns the offset in bytes of a slot among the wires of a chunk.
  // Slots are in rank order. With two hops they are ordered by local rank, each time with the own node first.
  std::size_t offset(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(order_[static_cast<std::size_t>(slot)]) * slot_bytes(chunk);
  }

  // Returns true if this rank keeps the wires of a slot in its secondary shard.
  bool holds(int slot) const { return places_[static_cast<std::size_t>(slot)] >= 0; }

  // Returns the offset in bytes of a held wire in the secondary shard.
  // The shard has one chunk after the other, each with its slots in the order of offset().
  std::size_t secondary_offset(int slot, std::int64_t chunk) const {
    return num_held_ * wire_offsets_[static_cast<std::size_t>(chunk)] +
           static_cast<std::size_t>(places_[static_cast<std::size_t>(slot)]) * slot_bytes(chunk);
  }

  // Calls visit(peer, first_slot, num_bytes) for each message of a hop.
  // Contiguous wires between two ranks share a message. A slot shorter than the longest ends one, so no gap is sent.
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
  // Returns true if the wire of `next` begins where the wire of `last` ends, on both sides.
  bool follows(const Move& last, const Move& next, std::int64_t chunk) const {
    return last.peer == next.peer && offset(last.slot, chunk) + num_bytes(last.slot, chunk) == offset(next.slot, chunk);
  }

  bool is_in_one_chunk_;
  bool is_in_one_hop_;
  std::int64_t longest_;
  std::vector<std::size_t> wire_offsets_;  // of each chunk in the wires of the longest slot, then their end
  std::array<Hop, 2> hops_;
  Hop secondary_hop_;
  std::vector<int> order_;   // of each rank's slot among the wires of a chunk
  std::vector<int> places_;  // of each rank's slot in the secondary shard; -1: not held
  std::size_t num_held_ = 0;
};

// Plan of an all_gather of 16-bit values by lossless differences (lossless.hpp), and of later gathers within nodes from
// the values that holders keep (Topology::holder()): see make_lossless_gather().
class LosslessPlan : public SlotPlan<BlockFormat> {
 public:
  // Plans a gather of `slots`, of any dtype but float32. Throws ArgumentError on float32.
  // `segments` let a call give its views per segment; they change no message. Without segments a slot is one view.
  // Requires their formats to be exact, which is not checked.
  LosslessPlan(World world, const SlotShape& slots, GatherSegments segments = {});

  // Returns the bytes that this rank sends in a gather if the differences of its shard have `body_bytes` bytes.
  // `body_bytes` does not include headers, the result does.
  LinkBytes bytes(std::size_t body_bytes) const;

  // Returns the bytes that this rank sends in a gather of unchanged values.
  LinkBytes bytes_from_secondary() const;

  // Returns the bytes of the values that this rank keeps.
  std::size_t secondary_bytes() const { return held_.size() * slot_bytes_; }

  // Returns the bytes of the largest secondary shard of any rank.
  std::size_t largest_secondary_bytes() const;

  // --- Internal: for the stages of the collective. A caller needs nothing below in this class.

  // Returns a chunk of every slot; shorter slots end within it.
  // Chunks are whole tiles, so cutting does not change their bytes.
  const Piece<BlockFormat>& chunk(std::int64_t number) const { return chunks_[number].front(); }

  // Returns the elements of the longest chunk, which is the first; 0 without chunks.
  std::int64_t longest_chunk() const { return num_chunks() == 0 ? 0 : chunk(0).count; }

  // Returns the parts of a chunk, each in one segment.
  std::span<const Piece<BlockFormat>> parts(std::int64_t chunk) const {
    return parts_[static_cast<std::size_t>(chunk)];
  }

  // Returns the first hop: from the owners of slots to their holders in other nodes.
  const Hop& inter_node_hop() const { return inter_node_hop_; }

  // Returns the second hop: from the holders to the other ranks of the node.
  const Hop& intra_node_hop() const { return intra_node_hop_; }

  // Returns the slots that this rank holds, in rank order. Their values are stored in this order.
  const std::vector<int>& held() const { return held_; }

  // Returns the index of a slot in held(), or -1 if this rank does not hold it.
  int place(int slot) const { return places_[static_cast<std::size_t>(slot)]; }

  // Returns the offset in bytes of a held slot in the secondary shard.
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

// Plan of a reduce_scatter: see make_reduce_scatter().
class ReducePlan : public SlotPlan<HopFormats> {
 public:
  // Plans a reduction of `slots` in the formats of `segments`, which is copied.
  // `feedback` is the format of error feedback's residual. Without it a call has no error feedback.
  // Throws ArgumentError also if the slots do not have a float dtype.
  ReducePlan(World world, SlotShape slots, ReduceSegments segments, std::optional<BlockFormat> feedback = {});

  // Returns the format of the residual, if there is one.
  const std::optional<BlockFormat>& feedback() const { return feedback_; }

  // Returns the bytes that this rank sends in each hop.
  std::array<LinkBytes, 2> bytes_by_hop() const;

  // Returns the bytes that this rank sends in a call.
  LinkBytes bytes() const;

  // Returns the bytes of the residual; 0 without feedback.
  std::size_t residual_bytes() const { return residual_bytes_; }

  // --- Internal: for the stages of the collective. A caller needs nothing below in this class.

  // Returns hop 0 or 1; hop 1 is empty in a flat topology.
  const Hop& hop(int number) const { return hops_[static_cast<std::size_t>(number)]; }

  // Returns the wire bytes of one chunk of one slot on `link`, for values of type `dtype`.
  std::size_t num_bytes(int slot, std::int64_t chunk, Link link, DType dtype) const;

  // Returns the largest wire bytes of a chunk of the longest slot.
  std::size_t largest_bytes(Link link, DType dtype) const;

  // Returns the largest bytes of the float32 sums of a chunk of the longest slot, one wire per piece.
  std::size_t largest_sum_bytes() const;

  // Returns true if a piece of `owner`'s slot in this format has a residual.
  // Exact pieces, and slots of ranks that Topology::residual_owners() does not list, have none.
  bool has_residual(int owner, BlockFormat format) const {
    return feedback_ && !residual_offsets_[static_cast<std::size_t>(owner)].empty() &&
           format.kind != ElementKind::exact;
  }

  // Returns the offset in bytes of piece `index` of a chunk of `owner`'s slot in the residual.
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

// Plan of an all_reduce of one tensor: see make_all_reduce().
//
// It is a reduce_scatter and an all_gather of the tensor's slots, with the same chunks. Slots have whole blocks of all
// formats, so the last ones are short or empty, and no padding is copied.
class AllReducePlan {
 public:
  // Plans an all_reduce of `num_elements` elements. The all_gather uses the intra-node format.
  // `feedback` is the format of error feedback's residual in the reduce_scatter. Without it there is none.
  // Throws ArgumentError as the plans of both parts do. Requires `num_elements` to be 0 or more, which is not checked.
  AllReducePlan(const World& world, std::int64_t num_elements, DType dtype, HopFormats formats,
                std::optional<BlockFormat> feedback = {});

  // Returns the plan of the reduce_scatter.
  const ReducePlan& reduce() const { return reduce_; }

  // Returns the plan of the all_gather.
  const GatherPlan& gather() const { return gather_; }

  // Returns the elements of the tensor.
  std::int64_t num_elements() const { return num_elements_; }

  // Returns shape and formats in words that ranks compare.
  const std::string& description() const { return description_; }

  // Returns the bytes that this rank sends in each hop: two of the reduce_scatter, then two of the all_gather.
  std::array<LinkBytes, 4> bytes_by_hop() const;

  // Returns the bytes that this rank sends in a call.
  LinkBytes bytes() const { return reduce_.bytes() + gather_.bytes(); }

  // Returns the bytes of the residual; 0 without feedback.
  std::size_t residual_bytes() const { return reduce_.residual_bytes(); }

 private:
  AllReducePlan(const World& world, const SlotShape& slots, HopFormats formats, std::optional<BlockFormat> feedback);

  std::int64_t num_elements_;
  std::string description_;
  ReducePlan reduce_;
  GatherPlan gather_;
};

}  // namespace zcomm
