#include "pipeline.hpp"

namespace zcomm {
namespace {

// The wires of the chunks that are under way: one slot per rank, side by side, as the transport's own all_gather wants
// them.
class GatheredWires {
 public:
  GatheredWires(const Resources& r, std::span<const TensorView> slots, BlockFormat format, const Chunks& chunks,
                std::int64_t longest, int depth)
      : slots_(slots),
        format_(format),
        chunks_(chunks),
        longest_(longest),
        depth_(depth),
        chunk_bytes_(slot_bytes(0) * slots.size()),
        scratch_(r.workspace, chunk_bytes_ * static_cast<std::size_t>(depth), r.stream) {}

  // Of the longest slot.
  std::size_t slot_bytes(std::int64_t chunk) const {
    const std::int64_t elements = std::min(chunks_.elements, longest_ - chunks_.begin(chunk));
    return WireLayout(format_, slots_[0].dtype, elements).num_bytes;
  }

  TensorView values(int rank, std::int64_t chunk) const {
    return slots_[static_cast<std::size_t>(rank)].slice(chunks_.begin(chunk), chunks_.elements);
  }
  std::byte* data(int rank, std::int64_t chunk) const {
    return scratch_.data() + static_cast<std::size_t>(chunk % depth_) * chunk_bytes_ +
           static_cast<std::size_t>(rank) * slot_bytes(chunk);
  }
  std::size_t num_bytes(int rank, std::int64_t chunk) const {
    const TensorView view = values(rank, chunk);
    return WireLayout(format_, view.dtype, view.num_elements).num_bytes;
  }
  Send send(int peer, int slot, std::int64_t chunk) const { return {peer, data(slot, chunk), num_bytes(slot, chunk)}; }
  Recv recv(int peer, int slot, std::int64_t chunk) const { return {peer, data(slot, chunk), num_bytes(slot, chunk)}; }

 private:
  std::span<const TensorView> slots_;
  BlockFormat format_;
  Chunks chunks_;
  std::int64_t longest_;
  int depth_;
  std::size_t chunk_bytes_;
  Scratch scratch_;
};

}  // namespace

void all_gather(const Resources& r, ConstTensorView shard, std::span<const TensorView> slots, BlockFormat format) {
  constexpr int kDepth = 3;  // stages
  const int rank = r.transport.rank();
  const int size = r.transport.size();
  const bool hierarchical = r.topology.is_hierarchical();
  const std::span<const int> local_ranks = r.topology.ranks(r.topology.node(rank));

  std::int64_t longest = 0;
  for (const TensorView& slot : slots) longest = std::max(longest, slot.num_elements);
  const bool even =
      std::all_of(slots.begin(), slots.end(), [&](const TensorView& slot) { return slot.num_elements == longest; });
  const Chunks chunks = make_chunks(r, longest, shard.dtype, format, format);
  if (chunks.count == 0) return;
  const GatheredWires wires(r, slots, format, chunks, longest, kDepth);
  Ring<std::unique_ptr<Transfer>, kDepth> first_hop;
  Ring<std::unique_ptr<Transfer>, kDepth> second_hop;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Decode> decodes;

  // Ranks in other nodes that hold what this node gets through `local`.
  const auto for_each_counterpart = [&](int local, auto&& visit) {
    for (int node = 0; node < r.topology.num_nodes(); ++node) {
      if (node != r.topology.node(rank)) visit(r.topology.ranks(node)[static_cast<std::size_t>(local)]);
    }
  };

  const auto encode_and_send = [&](std::int64_t chunk) {
    const Encode job{shard.slice(chunks.begin(chunk), chunks.elements), format, wires.data(rank, chunk)};
    {
      const Timed timed(r.stats.codec_time);
      r.codec.encode({&job, 1}, r.stream);
    }
    if (!hierarchical && even) {
      first_hop[chunk] = start_all_gather(r, wires.data(0, chunk), wires.slot_bytes(chunk));
      return;
    }
    sends.clear();
    recvs.clear();
    const auto exchange = [&](int peer) {
      if (peer == rank) return;
      sends.push_back(wires.send(peer, rank, chunk));
      recvs.push_back(wires.recv(peer, peer, chunk));
    };
    if (hierarchical) {
      for_each_counterpart(r.topology.local_rank(rank), exchange);
      for (const int peer : local_ranks) exchange(peer);
    } else {
      for (int shift = 1; shift < size; ++shift) exchange((rank + shift) % size);
    }
    first_hop[chunk] = start_transfer(r, sends, recvs);
  };

  const auto forward_inside_node = [&](std::int64_t chunk) {
    finish_transfer(r, first_hop[chunk]);
    if (!hierarchical) return;
    sends.clear();
    recvs.clear();
    for (const int peer : local_ranks) {
      if (peer == rank) continue;
      for_each_counterpart(r.topology.local_rank(rank),
                           [&](int slot) { sends.push_back(wires.send(peer, slot, chunk)); });
      for_each_counterpart(r.topology.local_rank(peer),
                           [&](int slot) { recvs.push_back(wires.recv(peer, slot, chunk)); });
    }
    second_hop[chunk] = start_transfer(r, sends, recvs);
  };

  const auto decode_all = [&](std::int64_t chunk) {
    if (hierarchical) finish_transfer(r, second_hop[chunk]);
    decodes.clear();
    for (int slot = 0; slot < size; ++slot) {
      const TensorView values = wires.values(slot, chunk);
      decodes.push_back({{wires.data(slot, chunk), format, values.dtype}, values});
    }
    const Timed timed(r.stats.codec_time);
    r.codec.decode(decodes, r.stream);
  };

  run_pipeline(chunks.count, encode_and_send, forward_inside_node, decode_all);
}

}  // namespace zcomm
