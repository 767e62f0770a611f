#include "gathered_wires.hpp"

namespace zcomm {

void all_gather(const Resources& r, ConstTensorView shard, std::span<const TensorView> slots, GatherSegments segments,
                GatherExtras extras) {
  constexpr int kDepth = 3;  // stages
  const int rank = r.transport.rank();
  const int size = r.transport.size();
  const bool hierarchical = r.topology.is_hierarchical();
  const std::span<const int> local_ranks = r.topology.ranks(r.topology.node(rank));

  const GatherPlan plan(r.chunk_bytes, slots, segments);
  if (plan.num_chunks() == 0) return;
  const bool even = extras.secondary == nullptr && plan.is_even();  // wires are equal and side by side
  const GatheredWires wires(r, plan, extras.secondary, kDepth);
  Ring<std::unique_ptr<Transfer>, kDepth> first_hop;
  Ring<std::unique_ptr<Transfer>, kDepth> second_hop;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Encode> encodes;
  std::vector<DecodeSumEncode> differences;
  std::vector<Wire> terms;
  GatheredWires::Jobs decodes;
  const TensorView reference{extras.reference, shard.num_elements, shard.dtype};

  // Ranks in other nodes that hold what this node gets through `local`.
  const auto for_each_counterpart = [&](int local, auto&& visit) {
    for (int node = 0; node < r.topology.num_nodes(); ++node) {
      if (node != r.topology.node(rank)) visit(r.topology.ranks(node)[static_cast<std::size_t>(local)]);
    }
  };

  const auto encode_and_send = [&](std::int64_t chunk) {
    encodes.clear();
    differences.clear();
    terms.clear();
    terms.reserve(2 * plan.num_pieces(chunk));  // jobs hold spans of it
    plan.for_each_piece(
        shard, chunk, wires.data(rank, chunk),
        [&](ConstTensorView values, const Piece<BlockFormat>& piece, std::byte* wire) {
          const Rounding rounding = rounding_of(r, rank, piece, piece.format);
          if (extras.reference == nullptr || piece.format.kind == ElementKind::exact) {
            encodes.push_back({values, piece.format, wire, rounding});
            return;
          }
          terms.push_back({values.data, {}, values.dtype});
          // As add() takes it: values that are finite again arrive whole.
          terms.push_back({reference.slice(piece.begin, piece.count).data, {}, values.dtype, -1.0f, true});
          differences.push_back({std::span(terms).last(2), values.num_elements, piece.format, wire, rounding});
        });
    {
      const Timed timed(r.stats.codec_time);
      r.codec.encode(encodes, r.stream);
      r.codec.decode_sum_encode(differences, r.stream);
    }
    if (!hierarchical && even) {
      first_hop[chunk] = start_all_gather(r, wires.data(0, chunk), plan.slot_bytes(chunk));
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
    if (extras.reference == nullptr) {
      wires.decode(r, chunk, decodes);
    } else {
      wires.add(r, chunk, reference, decodes);
    }
  };

  run_pipeline(plan.num_chunks(), encode_and_send, forward_inside_node, decode_all);
}

}  // namespace zcomm
