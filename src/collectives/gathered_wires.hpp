// The wires of a gather: in scratch while their chunk is under way, or in a secondary shard.
#pragma once

#include "pipeline.hpp"

namespace zcomm {

// The chunks of a gather into `slots`: the same on all ranks.
struct GatherPlan {
  GatherPlan(std::size_t chunk_bytes, std::span<const TensorView> all_slots, BlockFormat wire_format)
      : slots(all_slots), format(wire_format) {
    for (const TensorView& slot : slots) longest = std::max(longest, slot.num_elements);
    chunks = make_chunks(chunk_bytes, static_cast<int>(slots.size()), longest, slots[0].dtype, format, format);
  }

  TensorView values(int rank, std::int64_t chunk) const {
    return slots[static_cast<std::size_t>(rank)].slice(chunks.begin(chunk), chunks.elements);
  }
  std::size_t num_bytes(int rank, std::int64_t chunk) const {
    const TensorView view = values(rank, chunk);
    return WireLayout(format, view.dtype, view.num_elements).num_bytes;
  }
  // Of the longest slot.
  std::size_t slot_bytes(std::int64_t chunk) const {
    const std::int64_t elements = std::min(chunks.elements, longest - chunks.begin(chunk));
    return WireLayout(format, slots[0].dtype, elements).num_bytes;
  }

  std::span<const TensorView> slots;
  BlockFormat format;
  std::int64_t longest = 0;
  Chunks chunks;
};

// Which rank of a node keeps the wire of `slot`.
inline int keeper(const Topology& topology, int node, int slot) {
  const std::span<const int> ranks = topology.ranks(node);
  return ranks[static_cast<std::size_t>(topology.local_rank(slot)) % ranks.size()];
}

// Where the wires of a secondary shard lie: slot after slot in rank order, each with all of its chunks.
class SecondaryLayout {
 public:
  SecondaryLayout(const Topology& topology, int rank, const GatherPlan& plan) : chunk_bytes_(plan.slot_bytes(0)) {
    const std::int64_t last = plan.chunks.count - 1;
    slot_bytes_ = static_cast<std::size_t>(last) * chunk_bytes_ + plan.slot_bytes(last);
    for (int slot = 0; slot < topology.size(); ++slot) {
      const bool kept = keeper(topology, topology.node(rank), slot) == rank;
      places_.push_back(kept ? num_kept_++ : -1);
    }
  }

  bool keeps(int slot) const { return places_[static_cast<std::size_t>(slot)] >= 0; }
  std::size_t num_bytes() const { return static_cast<std::size_t>(num_kept_) * slot_bytes_; }
  std::size_t offset(int slot, std::int64_t chunk) const {
    return static_cast<std::size_t>(places_[static_cast<std::size_t>(slot)]) * slot_bytes_ +
           static_cast<std::size_t>(chunk) * chunk_bytes_;
  }

 private:
  std::size_t chunk_bytes_;  // of every chunk of a slot but its last
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
        chunk_bytes_(plan.slot_bytes(0) * plan.slots.size()),
        scratch_(r.workspace, chunk_bytes_ * static_cast<std::size_t>(depth), r.stream) {
    if (secondary != nullptr) layout_.emplace(r.topology, r.transport.rank(), plan);
  }

  std::byte* data(int slot, std::int64_t chunk) const {
    if (layout_ && layout_->keeps(slot)) return secondary_ + layout_->offset(slot, chunk);
    return scratch_.data() + static_cast<std::size_t>(chunk % depth_) * chunk_bytes_ +
           static_cast<std::size_t>(slot) * plan_.slot_bytes(chunk);
  }
  Send send(int peer, int slot, std::int64_t chunk) const {
    return {peer, data(slot, chunk), plan_.num_bytes(slot, chunk)};
  }
  Recv recv(int peer, int slot, std::int64_t chunk) const {
    return {peer, data(slot, chunk), plan_.num_bytes(slot, chunk)};
  }

  // Fills all slots with the values of a chunk. `jobs` is room for it.
  void decode(const Resources& r, std::int64_t chunk, std::vector<Decode>& jobs) const {
    jobs.clear();
    for (int slot = 0; slot < r.transport.size(); ++slot) {
      const TensorView values = plan_.values(slot, chunk);
      jobs.push_back({{data(slot, chunk), plan_.format, values.dtype}, values});
    }
    const Timed timed(r.stats.codec_time);
    r.codec.decode(jobs, r.stream);
  }

 private:
  const GatherPlan& plan_;
  std::byte* secondary_;
  int depth_;
  std::size_t chunk_bytes_;
  Scratch scratch_;
  std::optional<SecondaryLayout> layout_;
};

}  // namespace zcomm
