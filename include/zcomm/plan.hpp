// What one rank does in a collective of given lengths, dtype and formats. A plan is made once, tells what the call will
// cost, and is run as often as the call is made: see Communicator. It knows no addresses.
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
#include "zcomm/segment.hpp"
#include "zcomm/topology.hpp"

namespace zcomm {

// The slots of all ranks, as far as a plan knows them.
struct SlotShape {
  std::vector<std::int64_t> lengths;  // of each rank's slot, in elements; at least one
  DType dtype = DType::float32;

  std::int64_t longest() const;
  bool is_even() const;           // all lengths are equal
  std::string to_string() const;  // "float32[2 x 12]" or "float32[12,7]"
  friend bool operator==(const SlotShape&, const SlotShape&) = default;
};

// At least one slot.
template <class Views>
SlotShape shape_of(const Views& slots) {
  SlotShape shape{{}, slots.front().dtype};
  shape.lengths.reserve(slots.size());
  for (const auto& slot : slots) shape.lengths.push_back(slot.num_elements);
  return shape;
}

// Bytes that a rank sends.
struct LinkBytes {
  std::size_t intra_node = 0;  // to ranks of the same node
  std::size_t inter_node = 0;
  friend bool operator==(const LinkBytes&, const LinkBytes&) = default;
  friend LinkBytes operator+(LinkBytes a, LinkBytes b) {
    return {a.intra_node + b.intra_node, a.inter_node + b.inter_node};
  }
};

// Values that a rank's codec writes into wires and reads out of them, parts that are sent exactly included. What a sum
// takes without a wire, the own contribution, does not count.
struct CodecPasses {
  std::int64_t encoded = 0;
  std::int64_t decoded = 0;
  friend bool operator==(const CodecPasses&, const CodecPasses&) = default;
};

// An all_gather, and the gathers from secondary shards that it fills.
class GatherPlan {
 public:
  // `segments` have the elements of the longest slot. `chunk_bytes`: of values, per slot and chunk, which are cut at
  // multiples of `granule` elements of a segment. Throws ArgumentError.
  GatherPlan(Topology topology, int rank, std::size_t chunk_bytes, SlotShape slots, GatherSegments segments,
             std::int64_t granule = 1);

  const Topology& topology() const { return topology_; }
  int rank() const { return rank_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  const SlotShape& slots() const { return slots_; }
  GatherSegments segments() const { return segments_; }
  // Shape and segments, in words that ranks compare.
  const std::string& description() const { return description_; }

  std::array<LinkBytes, 2> bytes_by_hop() const { return {bytes_of(hops_[0]), bytes_of(hops_[1])}; }
  LinkBytes bytes() const { return bytes_of(hops_[0]) + bytes_of(hops_[1]); }
  CodecPasses passes() const;

  // The secondary shard of this rank, and the largest of all ranks.
  std::size_t secondary_bytes() const { return static_cast<std::size_t>(num_held_) * wire_offsets_.back(); }
  std::size_t largest_secondary_bytes() const;
  // What a gather from secondary shards sends and, having encoded nothing, decodes.
  LinkBytes bytes_from_secondary() const { return bytes_of(secondary_hop_); }
  CodecPasses passes_from_secondary() const { return {0, passes().decoded}; }

  // --- What the collective itself asks

  std::int64_t num_chunks() const { return chunks_.count(); }
  std::span<const Piece<BlockFormat>> pieces(std::int64_t chunk) const { return chunks_[chunk]; }
  std::span<const Hop> hops() const { return hops_; }
  const Hop& secondary_hop() const { return secondary_hop_; }
  // Bytes of a chunk of one slot, and of the longest one.
  std::size_t num_bytes(int slot, std::int64_t chunk) const;
  std::size_t slot_bytes(std::int64_t chunk) const {
    const auto i = static_cast<std::size_t>(chunk);
    return wire_offsets_[i + 1] - wire_offsets_[i];
  }
  // Where the wires of a secondary shard lie: slot after slot in rank order, each with all of its chunks.
  bool holds(int slot) const { return places_[static_cast<std::size_t>(slot)] >= 0; }
  std::size_t secondary_offset(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(places_[static_cast<std::size_t>(slot)]) * wire_offsets_.back() +
           wire_offsets_[static_cast<std::size_t>(chunk)];
  }

 private:
  LinkBytes bytes_of(const Hop& hop) const;

  Topology topology_;
  int rank_;
  std::size_t chunk_bytes_;
  SlotShape slots_;
  std::vector<Segment<BlockFormat>> segments_;
  std::string description_;
  Chunks<BlockFormat> chunks_;
  std::int64_t longest_;
  std::vector<std::size_t> wire_offsets_;  // of each chunk in the wires of the longest slot, and their end
  std::array<Hop, 2> hops_;
  Hop secondary_hop_;
  std::vector<int> places_;  // of each rank's slot in the secondary shard, -1 if this rank does not hold it
  int num_held_ = 0;
};

// An all_gather of 16-bit values by lossless differences (difference.hpp), and the gathers inside nodes from what it
// leaves with the holders of slots: Topology::holder().
class DifferencePlan {
 public:
  // `chunk_bytes`: of values, per slot and chunk. Throws ArgumentError.
  DifferencePlan(Topology topology, int rank, std::size_t chunk_bytes, const SlotShape& slots);

  const Topology& topology() const { return topology_; }
  int rank() const { return rank_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  const SlotShape& slots() const { return slots_; }
  const std::string& description() const { return description_; }

  // Of a gather whose differences of this rank's shard take `body_bytes`, besides their headers.
  LinkBytes bytes(std::size_t body_bytes) const;
  // Values that the codec of differences encodes and decodes. What is copied does not count.
  CodecPasses passes() const;
  // Of a gather of values that have not changed.
  LinkBytes bytes_from_secondary() const;

  // Of the values that this rank keeps, and of those of the rank that keeps most.
  std::size_t kept_bytes() const { return static_cast<std::size_t>(num_held_) * slot_bytes_; }
  std::size_t largest_kept_bytes() const;

  // --- What the collective itself asks

  std::int64_t num_chunks() const { return chunks_.count(); }
  // Of every slot, cut off where it is shorter. Chunks are whole tiles, so that cutting does not change their bytes.
  const Piece<BlockFormat>& chunk(std::int64_t number) const { return chunks_[number].front(); }
  std::int64_t longest_chunk() const { return longest_chunk_; }  // in elements
  const Hop& inter_node_hop() const { return inter_node_hop_; }
  const Hop& intra_node_hop() const { return intra_node_hop_; }
  // Kept values lie slot after slot in rank order. Number of a held slot among them, -1 if this rank does not hold it.
  int place(int slot) const { return places_[static_cast<std::size_t>(slot)]; }
  std::size_t kept_offset(int slot) const { return static_cast<std::size_t>(place(slot)) * slot_bytes_; }
  int num_held() const { return num_held_; }

 private:
  Topology topology_;
  int rank_;
  std::size_t chunk_bytes_;
  SlotShape slots_;
  std::string description_;
  Chunks<BlockFormat> chunks_;
  std::int64_t longest_chunk_ = 0;
  Hop inter_node_hop_;
  Hop intra_node_hop_;
  std::size_t slot_bytes_;   // of the longest slot, aligned
  std::vector<int> places_;  // of each rank's slot
  int num_held_ = 0;
};

// A reduce_scatter.
class ReducePlan {
 public:
  // `feedback`: the format of the residual of error feedback, if there is one. Segments are all direct, or none is.
  // Otherwise as GatherPlan.
  ReducePlan(Topology topology, int rank, std::size_t chunk_bytes, SlotShape slots, ReduceSegments segments,
             std::optional<BlockFormat> feedback = {});

  const Topology& topology() const { return topology_; }
  int rank() const { return rank_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  const SlotShape& slots() const { return slots_; }
  ReduceSegments segments() const { return segments_; }
  const std::optional<BlockFormat>& feedback() const { return feedback_; }
  // All is sent exactly, straight to the owners.
  bool is_direct() const { return !segments_.empty() && segments_.front().format.direct; }
  const std::string& description() const { return description_; }

  std::array<LinkBytes, 2> bytes_by_hop() const;
  LinkBytes bytes() const;
  CodecPasses passes() const;                                     // without those of a residual
  std::size_t residual_bytes() const { return residual_bytes_; }  // 0 without feedback

  // --- What the collective itself asks

  std::int64_t num_chunks() const { return chunks_.count(); }
  std::span<const Piece<HopFormats>> pieces(std::int64_t chunk) const { return chunks_[chunk]; }
  const Hop& hop(int number) const { return hops_[static_cast<std::size_t>(number)]; }
  // Bytes of a chunk of one slot over a link, `dtype` that of the values that are encoded; and of the largest chunk of
  // the longest slot.
  std::size_t num_bytes(int slot, std::int64_t chunk, Link link, DType dtype) const;
  std::size_t largest_bytes(Link link, DType dtype) const;
  std::size_t largest_sum_bytes() const;  // of float32 sums of such a chunk, each piece a wire
  // Where the residual has piece `index` of a chunk of the slot of `owner`. It has none of what is sent exactly, nor of
  // slots that Topology::residual_owners() lacks.
  bool has_residual(int owner, BlockFormat format) const {
    return feedback_ && first_residual_[static_cast<std::size_t>(owner)] >= 0 && format.kind != ElementKind::exact;
  }
  std::size_t residual_offset(int owner, std::int64_t chunk, std::size_t index) const {
    const auto first = static_cast<std::size_t>(first_residual_[static_cast<std::size_t>(owner)]);
    return residual_offsets_[first + chunks_.first_piece(chunk) + index];
  }

 private:
  void lay_out_residual(BlockFormat feedback);

  Topology topology_;
  int rank_;
  std::size_t chunk_bytes_;
  SlotShape slots_;
  std::vector<Segment<HopFormats>> segments_;
  std::optional<BlockFormat> feedback_;
  std::string description_;
  Chunks<HopFormats> chunks_;
  std::array<Hop, 2> hops_;
  std::vector<std::ptrdiff_t> first_residual_;  // of each owner, in residual_offsets_; -1: none
  std::vector<std::size_t> residual_offsets_;   // owner after owner, of each all pieces
  std::size_t residual_bytes_ = 0;
};

// An all_reduce of one tensor: a reduce_scatter and an all_gather of slots of whole blocks of all formats, so that the
// last ones are short or empty and no padding is copied. Both have the same chunks.
class AllReducePlan {
 public:
  AllReducePlan(const Topology& topology, int rank, std::size_t chunk_bytes, std::int64_t num_elements, DType dtype,
                HopFormats formats, std::optional<BlockFormat> feedback = {});

  const ReducePlan& reduce() const { return reduce_; }
  const GatherPlan& gather() const { return gather_; }
  std::int64_t num_elements() const { return num_elements_; }
  const std::string& description() const { return description_; }

  std::array<LinkBytes, 4> bytes_by_hop() const;  // two of the reduce_scatter, then two of the all_gather
  LinkBytes bytes() const { return reduce_.bytes() + gather_.bytes(); }
  CodecPasses passes() const;
  std::size_t residual_bytes() const { return reduce_.residual_bytes(); }

 private:
  AllReducePlan(const Topology& topology, int rank, std::size_t chunk_bytes, const SlotShape& slots, HopFormats formats,
                std::optional<BlockFormat> feedback);

  std::int64_t num_elements_;
  std::string description_;
  ReducePlan reduce_;
  GatherPlan gather_;
};

}  // namespace zcomm
