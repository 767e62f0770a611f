#include "pipeline.hpp"

namespace zcomm {
namespace {

std::size_t wire_bytes(BlockFormat format, ConstTensorView values) {
  return WireLayout(format, values.dtype, values.num_elements).num_bytes;
}

Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

// Buffers for `num_peers` messages of each chunk that is under way.
class Messages {
 public:
  Messages(const Resources& r, int num_peers, std::size_t message_bytes, int depth)
      : num_peers_(num_peers),
        depth_(depth),
        message_bytes_(message_bytes),
        scratch_(r.workspace, message_bytes * static_cast<std::size_t>(num_peers) * static_cast<std::size_t>(depth),
                 r.stream) {}

  std::byte* data(int peer, std::int64_t chunk) const {
    const auto place = static_cast<std::size_t>((chunk % depth_) * num_peers_ + peer);
    return scratch_.data() + place * message_bytes_;
  }

 private:
  int num_peers_;
  int depth_;
  std::size_t message_bytes_;
  Scratch scratch_;
};

Chunks chunks_of(const Resources& r, std::span<const ConstTensorView> slots, HopFormats formats) {
  std::int64_t longest = 0;
  for (const ConstTensorView& slot : slots) longest = std::max(longest, slot.num_elements);
  return make_chunks(r.chunk_bytes, r.transport.size(), longest, slots[0].dtype, formats.inside, formats.between);
}

// One hop, straight to the owner. Each pair of ranks uses the format of the link between them.
void reduce_scatter_flat(const Resources& r, std::span<const ConstTensorView> slots, TensorView output,
                         HopFormats formats, float factor) {
  constexpr int kDepth = 2;
  const int rank = r.transport.rank();
  const int size = r.transport.size();
  const Chunks chunks = chunks_of(r, slots, formats);
  if (chunks.count == 0) return;
  const auto format_to = [&](int peer) { return r.topology.same_node(rank, peer) ? formats.inside : formats.between; };
  const auto piece = [&](int slot, std::int64_t chunk) {
    return slots[static_cast<std::size_t>(slot)].slice(chunks.begin(chunk), chunks.elements);
  };
  const std::size_t message_bytes = std::max(WireLayout(formats.inside, output.dtype, chunks.elements).num_bytes,
                                             WireLayout(formats.between, output.dtype, chunks.elements).num_bytes);
  const Messages outgoing(r, size, message_bytes, kDepth);
  const Messages incoming(r, size, message_bytes, kDepth);
  Ring<std::unique_ptr<Transfer>, kDepth> transfers;
  std::vector<Encode> encodes;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Wire> terms;

  const auto encode_and_send = [&](std::int64_t chunk) {
    encodes.clear();
    sends.clear();
    recvs.clear();
    for (int shift = 1; shift < size; ++shift) {
      const int to = (rank + shift) % size;
      const int from = (rank - shift + size) % size;
      encodes.push_back({piece(to, chunk), format_to(to), outgoing.data(to, chunk)});
      sends.push_back({to, outgoing.data(to, chunk), wire_bytes(format_to(to), piece(to, chunk))});
      recvs.push_back({from, incoming.data(from, chunk), wire_bytes(format_to(from), piece(rank, chunk))});
    }
    {
      const Timed timed(r.stats.codec_time);
      r.codec.encode(encodes, r.stream);
    }
    transfers[chunk] = start_transfer(r, sends, recvs);
  };

  const auto sum = [&](std::int64_t chunk) {
    finish_transfer(r, transfers[chunk]);
    terms.clear();
    for (int peer = 0; peer < size; ++peer) {
      terms.push_back(peer == rank ? exact_wire(piece(rank, chunk))
                                   : Wire{incoming.data(peer, chunk), format_to(peer), output.dtype});
    }
    const DecodeSum job{terms, factor, output.slice(chunks.begin(chunk), chunks.elements)};
    const Timed timed(r.stats.codec_time);
    r.codec.decode_sum({&job, 1}, r.stream);
  };

  run_pipeline(chunks.count, encode_and_send, sum);
}

// Two hops. A rank first sums, over its node, the slots of all ranks that have its local rank, one slot for each node;
// then it sends each of these sums to the node of its owner.
void reduce_scatter_hierarchical(const Resources& r, std::span<const ConstTensorView> slots, TensorView output,
                                 HopFormats formats, float factor) {
  constexpr int kDepth = 3;
  const int rank = r.transport.rank();
  const int num_nodes = r.topology.num_nodes();
  const int own_node = r.topology.node(rank);
  const int own_local = r.topology.local_rank(rank);
  const std::span<const int> local_ranks = r.topology.ranks(own_node);
  const int node_size = static_cast<int>(local_ranks.size());
  const Chunks chunks = chunks_of(r, slots, formats);
  if (chunks.count == 0) return;
  const auto owner = [&](int node, int local) { return r.topology.ranks(node)[static_cast<std::size_t>(local)]; };
  const auto piece = [&](int node, int local, std::int64_t chunk) {
    return slots[static_cast<std::size_t>(owner(node, local))].slice(chunks.begin(chunk), chunks.elements);
  };

  const std::size_t inside_bytes = WireLayout(formats.inside, output.dtype, chunks.elements).num_bytes;
  const std::size_t between_bytes = WireLayout(formats.between, DType::float32, chunks.elements).num_bytes;
  const std::size_t partial_bytes = WireLayout({}, DType::float32, chunks.elements).num_bytes;
  const Messages first_out(r, node_size, inside_bytes * static_cast<std::size_t>(num_nodes), kDepth);
  const Messages first_in(r, node_size, inside_bytes * static_cast<std::size_t>(num_nodes), kDepth);
  const Messages second_out(r, num_nodes, between_bytes, kDepth);
  const Messages second_in(r, num_nodes, between_bytes, kDepth);
  const Messages partial(r, 1, partial_bytes, kDepth);  // float32 sums of the own slot over the own node
  Ring<std::unique_ptr<Transfer>, kDepth> first_hop;
  Ring<std::unique_ptr<Transfer>, kDepth> second_hop;
  std::vector<Encode> encodes;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Wire> terms;
  std::vector<DecodeSumEncode> forwards;

  // A message between local ranks holds one wire per node, in node order, back to back. This order is the transpose
  // that brings every slot to its owner in the second hop.

  const auto encode_and_send_inside = [&](std::int64_t chunk) {
    encodes.clear();
    sends.clear();
    recvs.clear();
    std::size_t own_bytes = 0;
    for (int node = 0; node < num_nodes; ++node) {
      own_bytes += wire_bytes(formats.inside, piece(node, own_local, chunk));
    }
    for (int shift = 1; shift < node_size; ++shift) {
      const int to = (own_local + shift) % node_size;
      const int from = (own_local - shift + node_size) % node_size;
      std::size_t offset = 0;
      for (int node = 0; node < num_nodes; ++node) {
        encodes.push_back({piece(node, to, chunk), formats.inside, first_out.data(to, chunk) + offset});
        offset += wire_bytes(formats.inside, piece(node, to, chunk));
      }
      sends.push_back({owner(own_node, to), first_out.data(to, chunk), offset});
      recvs.push_back({owner(own_node, from), first_in.data(from, chunk), own_bytes});
    }
    {
      const Timed timed(r.stats.codec_time);
      r.codec.encode(encodes, r.stream);
    }
    first_hop[chunk] = start_transfer(r, sends, recvs);
  };

  const auto sum_and_send_between = [&](std::int64_t chunk) {
    finish_transfer(r, first_hop[chunk]);
    terms.clear();
    forwards.clear();
    sends.clear();
    recvs.clear();
    terms.reserve(static_cast<std::size_t>(num_nodes * node_size));  // jobs hold spans of it
    const std::int64_t own_elements = piece(own_node, own_local, chunk).num_elements;
    std::optional<DecodeSum> own_sum;
    std::size_t offset = 0;
    for (int node = 0; node < num_nodes; ++node) {
      const ConstTensorView values = piece(node, own_local, chunk);
      const std::size_t first_term = terms.size();
      for (int local = 0; local < node_size; ++local) {
        terms.push_back(local == own_local ? exact_wire(values)
                                           : Wire{first_in.data(local, chunk) + offset, formats.inside, values.dtype});
      }
      offset += wire_bytes(formats.inside, values);
      const std::span<const Wire> node_terms = std::span(terms).subspan(first_term);
      if (node == own_node) {
        own_sum = DecodeSum{node_terms, 1.0f, {partial.data(0, chunk), own_elements, DType::float32}};
      } else {
        const int peer = owner(node, own_local);
        forwards.push_back({node_terms, values.num_elements, formats.between, second_out.data(node, chunk)});
        const auto between = [&](std::int64_t n) { return WireLayout(formats.between, DType::float32, n).num_bytes; };
        sends.push_back({peer, second_out.data(node, chunk), between(values.num_elements)});
        recvs.push_back({peer, second_in.data(node, chunk), between(own_elements)});
      }
    }
    {
      const Timed timed(r.stats.codec_time);
      r.codec.decode_sum_encode(forwards, r.stream);
    }
    second_hop[chunk] = start_transfer(r, sends, recvs);
    const Timed timed(r.stats.codec_time);  // while the second hop is under way
    r.codec.decode_sum({&*own_sum, 1}, r.stream);
  };

  const auto sum_nodes = [&](std::int64_t chunk) {
    finish_transfer(r, second_hop[chunk]);
    const TensorView values = output.slice(chunks.begin(chunk), chunks.elements);
    terms.clear();
    for (int node = 0; node < num_nodes; ++node) {
      terms.push_back(node == own_node ? Wire{partial.data(0, chunk), {}, DType::float32}
                                       : Wire{second_in.data(node, chunk), formats.between, DType::float32});
    }
    const DecodeSum job{terms, factor, values};
    const Timed timed(r.stats.codec_time);
    r.codec.decode_sum({&job, 1}, r.stream);
  };

  run_pipeline(chunks.count, encode_and_send_inside, sum_and_send_between, sum_nodes);
}

}  // namespace

void reduce_scatter(const Resources& r, std::span<const ConstTensorView> slots, TensorView output, HopFormats formats,
                    float factor) {
  if (r.topology.is_hierarchical()) {
    reduce_scatter_hierarchical(r, slots, output, formats, factor);
  } else {
    reduce_scatter_flat(r, slots, output, formats, factor);
  }
}

}  // namespace zcomm
