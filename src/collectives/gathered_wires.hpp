// The wires of a gather: in scratch while their chunk is under way, or in a secondary shard.
#pragma once

#include "pipeline.hpp"

namespace zcomm {

// The chunks of a gather into `slots`: the same on all ranks.
class GatherPlan {
 public:
  GatherPlan(std::size_t chunk_bytes, std::span<const TensorView> slots, GatherSegments segments)
      : slots_(slots), chunks_(chunk_bytes, static_cast<int>(slots.size()), segments, slots[0].dtype) {
    for (const Segment<BlockFormat>& segment : segments) longest_ += segment.num_elements;
    for (std::int64_t chunk = 0; chunk < chunks_.count(); ++chunk) {
      longest_bytes_.push_back(message_bytes(longest_, chunk));
    }
  }

  std::int64_t num_chunks() const { return chunks_.count(); }
  std::size_t num_pieces(std::int64_t chunk) const { return chunks_[chunk].size(); }
  int num_slots() const { return static_cast<int>(slots_.size()); }
  bool is_even() const {
    return std::all_of(slots_.begin(), slots_.end(),
                       [this](const TensorView& slot) { return slot.num_elements == longest_; });
  }

  // Bytes of a chunk of one slot, and of the longest one.
  std::size_t num_bytes(int slot, std::int64_t chunk) const {
    const std::int64_t num_elements = slots_[static_cast<std::size_t>(slot)].num_elements;
    return num_elements == longest_ ? slot_bytes(chunk) : message_bytes(num_elements, chunk);
  }
  std::size_t slot_bytes(std::int64_t chunk) const { return longest_bytes_[static_cast<std::size_t>(chunk)]; }

  // Calls visit(values, piece, wire) for each piece of a chunk of `slot`, whose message is at `message`.
  template <class View, class Byte, class Visit>
  void for_each_piece(View slot, std::int64_t chunk, Byte* message, Visit&& visit) const {
    for (const Piece<BlockFormat>& piece : chunks_[chunk]) {
      const View values = slot.slice(piece.begin, piece.count);
      visit(values, piece, message);
      message += wire_bytes(piece.format, values.dtype, values.num_elements);
    }
  }
  TensorView slot(int rank) const { return slots_[static_cast<std::size_t>(rank)]; }

 private:
  std::size_t message_bytes(std::int64_t num_elements, std::int64_t chunk) const {
    std::size_t num_bytes = 0;
    for (const Piece<BlockFormat>& piece : chunks_[chunk]) {
      const std::int64_t count = std::clamp<std::int64_t>(num_elements - piece.begin, 0, piece.count);
      num_bytes += wire_bytes(piece.format, slots_[0].dtype, count);
    }
    return num_bytes;
  }

  std::span<const TensorView> slots_;
  Chunks<BlockFormat> chunks_;
  std::int64_t longest_ = 0;
  std::vector<std::size_t> longest_bytes_;  // of each chunk
};

// Which rank of a node keeps the wires of `slot`.
inline int keeper(const Topology& topology, int node, int slot) {
  const std::span<const int> ranks = topology.ranks(node);
  return ranks[static_cast<std::size_t>(topology.local_rank(slot)) % ranks.size()];
}

// Where the wires of a secondary shard lie: slot after slot in rank order, each with all of its chunks.
class SecondaryLayout {
 public:
  SecondaryLayout(const Topology& topology, int rank, const GatherPlan& plan) {
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      chunk_offsets_.push_back(slot_bytes_);
      slot_bytes_ += plan.slot_bytes(chunk);
    }
    for (int slot = 0; slot < topology.size(); ++slot) {
      const bool kept = keeper(topology, topology.node(rank), slot) == rank;
      places_.push_back(kept ? num_kept_++ : -1);
    }
  }

  bool keeps(int slot) const { return places_[static_cast<std::size_t>(slot)] >= 0; }
  std::size_t num_bytes() const { return static_cast<std::size_t>(num_kept_) * slot_bytes_; }
  std::size_t offset(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(places_[static_cast<std::size_t>(slot)]) * slot_bytes_ +
           chunk_offsets_[static_cast<std::size_t>(chunk)];
  }

 private:
  std::vector<std::size_t> chunk_offsets_;  // in a slot
  std::size_t slot_bytes_ = 0;
  std::vector<int> places_;  // of each rank's slot, -1 if it is not kept
  int num_kept_ = 0;
};

// The wires of the chunks that are under way: one slot per rank, side by side, as the transport's own all_gather wants
// them. Those that a secondary shard has, if there is one, are there instead.
class GatheredWires {
 public:
  GatheredWires(const Resources& r, const GatherPlan& plan, std::byte* secondary, int depth)
      : plan_(plan),
        secondary_(secondary),
        depth_(depth),
        slots_bytes_(largest(plan)),
        scratch_(r.workspace, slots_bytes_ * static_cast<std::size_t>(depth), r.stream) {
    if (secondary != nullptr) layout_.emplace(r.topology, r.transport.rank(), plan);
  }

  std::byte* data(int slot, std::int64_t chunk) const {
    if (layout_ && layout_->keeps(slot)) return secondary_ + layout_->offset(slot, chunk);
    return scratch_.data() + static_cast<std::size_t>(chunk % depth_) * slots_bytes_ +
           static_cast<std::size_t>(slot) * plan_.slot_bytes(chunk);
  }
  Send send(int peer, int slot, std::int64_t chunk) const {
    return {peer, data(slot, chunk), plan_.num_bytes(slot, chunk)};
  }
  Recv recv(int peer, int slot, std::int64_t chunk) const {
    return {peer, data(slot, chunk), plan_.num_bytes(slot, chunk)};
  }

  struct Jobs {  // kept from chunk to chunk, for their memory
    std::vector<Decode> decodes;
    std::vector<DecodeSum> sums;
    std::vector<Wire> terms;
  };

  // Fills all slots with the values of a chunk.
  void decode(const Resources& r, std::int64_t chunk, Jobs& jobs) const {
    jobs.decodes.clear();
    for_each_wire(chunk, [&](int, TensorView values, const Piece<BlockFormat>& piece, const std::byte* wire) {
      jobs.decodes.push_back({{wire, piece.format, values.dtype}, values});
    });
    const Timed timed(r.stats.codec_time);
    r.codec.decode(jobs.decodes, r.stream);
  }

  // Adds the differences of a chunk to what all slots hold, and the own slot to `reference`, which has what it held. A
  // NaN is held as 0, or it would stay.
  void add(const Resources& r, std::int64_t chunk, TensorView reference, Jobs& jobs) const {
    const int rank = r.transport.rank();
    jobs.decodes.clear();
    jobs.sums.clear();
    jobs.terms.clear();
    jobs.terms.reserve(2 * plan_.num_pieces(chunk) * static_cast<std::size_t>(plan_.num_slots()));
    for_each_wire(chunk, [&](int slot, TensorView values, const Piece<BlockFormat>& piece, const std::byte* data) {
      const Wire wire{data, piece.format, values.dtype};
      const TensorView target = slot == rank ? reference.slice(piece.begin, piece.count) : values;
      if (piece.format.kind == ElementKind::exact) {
        jobs.decodes.push_back({wire, target});
        return;
      }
      jobs.terms.push_back({target.data, {}, target.dtype, 1.0f, true});
      jobs.terms.push_back(wire);
      jobs.sums.push_back({std::span(jobs.terms).last(2), 1.0f, target});
    });
    const Timed timed(r.stats.codec_time);
    r.codec.decode(jobs.decodes, r.stream);
    r.codec.decode_sum(jobs.sums, r.stream);
    jobs.decodes.clear();
    plan_.for_each_piece(plan_.slot(rank), chunk, data(rank, chunk),
                         [&](TensorView values, const Piece<BlockFormat>& piece, const std::byte*) {
                           const ConstTensorView held = reference.slice(piece.begin, piece.count);
                           jobs.decodes.push_back({{held.data, {}, held.dtype}, values});
                         });
    r.codec.decode(jobs.decodes, r.stream);
  }

 private:
  template <class Visit>
  void for_each_wire(std::int64_t chunk, Visit&& visit) const {
    for (int slot = 0; slot < plan_.num_slots(); ++slot) {
      plan_.for_each_piece(plan_.slot(slot), chunk, data(slot, chunk),
                           [&](TensorView values, const Piece<BlockFormat>& piece, const std::byte* wire) {
                             visit(slot, values, piece, wire);
                           });
    }
  }

  static std::size_t largest(const GatherPlan& plan) {
    std::size_t num_bytes = 0;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      num_bytes = std::max(num_bytes, plan.slot_bytes(chunk));
    }
    return num_bytes * static_cast<std::size_t>(plan.num_slots());
  }

  const GatherPlan& plan_;
  std::byte* secondary_;
  int depth_;
  std::size_t slots_bytes_;  // of a chunk of all slots
  Scratch scratch_;
  std::optional<SecondaryLayout> layout_;
};

}  // namespace zcomm
