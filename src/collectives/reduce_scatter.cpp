#include "pipeline.hpp"
#include "residuals.hpp"

namespace zcomm {
namespace {

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

using Slots = std::span<const ConstTensorView>;
using HopChunks = Chunks<HopFormats>;

// The largest message of a chunk of one slot, in the formats that `format_of` picks.
template <class FormatOf>
std::size_t largest_message(const HopChunks& chunks, DType dtype, FormatOf&& format_of) {
  std::size_t largest = 0;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    std::size_t num_bytes = 0;
    for (const auto& piece : chunks[chunk]) num_bytes += wire_bytes(format_of(piece.format), dtype, piece.count);
    largest = std::max(largest, num_bytes);
  }
  return largest;
}

BlockFormat inside_of(const HopFormats& formats) { return formats.inside; }
BlockFormat between_of(const HopFormats& formats) { return formats.between; }

// One hop, straight to the owner. Each pair of ranks uses the format of the link between them.
void reduce_scatter_flat(const Resources& r, Slots slots, TensorView output, const HopChunks& chunks, float factor,
                         Residuals& residuals) {
  constexpr int kDepth = 2;
  const int rank = r.transport.rank();
  const int size = r.transport.size();
  const DType dtype = output.dtype;
  const auto format_to = [&](int peer, const HopFormats& formats) {
    return r.topology.same_node(rank, peer) ? formats.inside : formats.between;
  };
  const auto values_of = [&](int slot, const Piece<HopFormats>& piece) {
    return slots[static_cast<std::size_t>(slot)].slice(piece.begin, piece.count);
  };
  const std::size_t message_bytes =
      std::max(largest_message(chunks, dtype, inside_of), largest_message(chunks, dtype, between_of));
  const Messages outgoing(r, size, message_bytes, kDepth);
  const Messages incoming(r, size, message_bytes, kDepth);
  Ring<std::unique_ptr<Transfer>, kDepth> transfers;
  std::vector<Encode> encodes;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Wire> terms;
  std::vector<Wire> fed_back;
  std::vector<DecodeSumEncode> encodes_with_residual;
  std::vector<DecodeSum> sums;
  std::vector<std::size_t> offsets(static_cast<std::size_t>(size));  // in each rank's message

  const auto encode_and_send = [&](std::int64_t chunk) {
    encodes.clear();
    encodes_with_residual.clear();
    fed_back.clear();
    fed_back.reserve((1 + Residuals::kExtraTerms) * chunks[chunk].size() * static_cast<std::size_t>(size));
    residuals.begin_chunk();
    sends.clear();
    recvs.clear();
    for (int shift = 1; shift < size; ++shift) {
      const int to = (rank + shift) % size;
      const int from = (rank - shift + size) % size;
      std::byte* wire = outgoing.data(to, chunk);
      std::size_t expected = 0;
      for (std::size_t i = 0; i < chunks[chunk].size(); ++i) {
        const auto& piece = chunks[chunk][i];
        const ConstTensorView values = values_of(to, piece);
        const BlockFormat format = format_to(to, piece.format);
        const Rounding rounding = rounding_of(r, to, piece, format);
        if (residuals.covers(to, format)) {
          fed_back.push_back(exact_wire(values));
          residuals.encode(to, chunk, i, fed_back, fed_back.size() - 1,
                           {{}, values.num_elements, format, wire, rounding}, encodes_with_residual);
        } else {
          encodes.push_back({values, format, wire, rounding});
        }
        wire += wire_bytes(format, dtype, values.num_elements);
        expected += wire_bytes(format_to(from, piece.format), dtype, values_of(rank, piece).num_elements);
      }
      sends.push_back({to, outgoing.data(to, chunk), static_cast<std::size_t>(wire - outgoing.data(to, chunk))});
      recvs.push_back({from, incoming.data(from, chunk), expected});
    }
    {
      const Timed timed(r.stats.codec_time);
      r.codec.encode(encodes, r.stream);
      r.codec.decode_sum_encode(encodes_with_residual, r.stream);
    }
    transfers[chunk] = start_transfer(r, sends, recvs);
    const Timed timed(r.stats.codec_time);  // while they are under way
    r.codec.decode_sum_encode(residuals.updates(), r.stream);
  };

  const auto sum = [&](std::int64_t chunk) {
    finish_transfer(r, transfers[chunk]);
    terms.clear();
    sums.clear();
    terms.reserve(chunks[chunk].size() * static_cast<std::size_t>(size));  // jobs hold spans of it
    std::fill(offsets.begin(), offsets.end(), 0);
    for (const auto& piece : chunks[chunk]) {
      const ConstTensorView own = values_of(rank, piece);
      const std::size_t first_term = terms.size();
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) {
          terms.push_back(exact_wire(own));
          continue;
        }
        std::size_t& offset = offsets[static_cast<std::size_t>(peer)];
        terms.push_back({incoming.data(peer, chunk) + offset, format_to(peer, piece.format), dtype});
        offset += wire_bytes(format_to(peer, piece.format), dtype, own.num_elements);
      }
      sums.push_back({std::span(terms).subspan(first_term), factor, output.slice(piece.begin, piece.count)});
    }
    const Timed timed(r.stats.codec_time);
    r.codec.decode_sum(sums, r.stream);
  };

  run_pipeline(chunks.count(), encode_and_send, sum);
}

// Two hops. A rank first sums, over its node, the slots of all ranks that have its local rank, one slot for each node;
// then it sends each of these sums to the node of its owner.
void reduce_scatter_hierarchical(const Resources& r, Slots slots, TensorView output, const HopChunks& chunks,
                                 float factor, Residuals& residuals) {
  constexpr int kDepth = 3;
  const int rank = r.transport.rank();
  const int num_nodes = r.topology.num_nodes();
  const int own_node = r.topology.node(rank);
  const int own_local = r.topology.local_rank(rank);
  const std::span<const int> local_ranks = r.topology.ranks(own_node);
  const int node_size = static_cast<int>(local_ranks.size());
  const DType dtype = output.dtype;
  const auto owner = [&](int node, int local) { return r.topology.ranks(node)[static_cast<std::size_t>(local)]; };
  const auto values_of = [&](int node, int local, const Piece<HopFormats>& piece) {
    return slots[static_cast<std::size_t>(owner(node, local))].slice(piece.begin, piece.count);
  };

  const std::size_t inside_bytes = largest_message(chunks, dtype, inside_of) * static_cast<std::size_t>(num_nodes);
  const std::size_t between_bytes = largest_message(chunks, DType::float32, between_of);
  const std::size_t partial_bytes =
      largest_message(chunks, DType::float32, [](const HopFormats&) { return BlockFormat{}; });
  const Messages first_out(r, node_size, inside_bytes, kDepth);
  const Messages first_in(r, node_size, inside_bytes, kDepth);
  const Messages second_out(r, num_nodes, between_bytes, kDepth);
  const Messages second_in(r, num_nodes, between_bytes, kDepth);
  const Messages partial(r, 1, partial_bytes, kDepth);  // float32 sums of the own slot over the own node
  Ring<std::unique_ptr<Transfer>, kDepth> first_hop;
  Ring<std::unique_ptr<Transfer>, kDepth> second_hop;
  std::vector<Encode> encodes;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Wire> terms;
  std::vector<DecodeSum> sums;
  std::vector<DecodeSumEncode> forwards;

  // A message between local ranks holds the wires of one slot per node, in node order, back to back. This order is the
  // transpose that brings every slot to its owner in the second hop.

  const auto encode_and_send_inside = [&](std::int64_t chunk) {
    encodes.clear();
    sends.clear();
    recvs.clear();
    std::size_t own_bytes = 0;
    for (int node = 0; node < num_nodes; ++node) {
      for (const auto& piece : chunks[chunk]) {
        own_bytes += wire_bytes(piece.format.inside, dtype, values_of(node, own_local, piece).num_elements);
      }
    }
    for (int shift = 1; shift < node_size; ++shift) {
      const int to = (own_local + shift) % node_size;
      const int from = (own_local - shift + node_size) % node_size;
      std::byte* const message = first_out.data(to, chunk);
      std::byte* wire = message;
      for (int node = 0; node < num_nodes; ++node) {
        for (const auto& piece : chunks[chunk]) {
          const ConstTensorView values = values_of(node, to, piece);
          encodes.push_back(
              {values, piece.format.inside, wire, rounding_of(r, owner(node, to), piece, piece.format.inside)});
          wire += wire_bytes(piece.format.inside, dtype, values.num_elements);
        }
      }
      sends.push_back({owner(own_node, to), message, static_cast<std::size_t>(wire - message)});
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
    sums.clear();
    forwards.clear();
    sends.clear();
    recvs.clear();
    terms.reserve(chunks[chunk].size() * static_cast<std::size_t>(num_nodes) *  // jobs hold spans of it
                  (static_cast<std::size_t>(node_size) + Residuals::kExtraTerms));
    residuals.begin_chunk();
    std::size_t first_offset = 0;  // in messages of the first hop
    for (int node = 0; node < num_nodes; ++node) {
      std::byte* const message = second_out.data(node, chunk);
      std::byte* wire = message;
      std::byte* sum = partial.data(0, chunk);
      std::size_t expected = 0;
      for (std::size_t i = 0; i < chunks[chunk].size(); ++i) {
        const auto& piece = chunks[chunk][i];
        const ConstTensorView values = values_of(node, own_local, piece);
        const std::size_t first_term = terms.size();
        for (int local = 0; local < node_size; ++local) {
          terms.push_back(local == own_local
                              ? exact_wire(values)
                              : Wire{first_in.data(local, chunk) + first_offset, piece.format.inside, dtype});
        }
        first_offset += wire_bytes(piece.format.inside, dtype, values.num_elements);
        if (node == own_node) {
          sums.push_back({std::span(terms).subspan(first_term), 1.0f, {sum, values.num_elements, DType::float32}});
          sum += wire_bytes({}, DType::float32, values.num_elements);
        } else {
          const int to = owner(node, own_local);
          const DecodeSumEncode forward{std::span(terms).subspan(first_term), values.num_elements, piece.format.between,
                                        wire, rounding_of(r, to, piece, piece.format.between)};
          if (residuals.covers(to, forward.format)) {
            residuals.encode(to, chunk, i, terms, first_term, forward, forwards);
          } else {
            forwards.push_back(forward);
          }
          wire += wire_bytes(piece.format.between, DType::float32, values.num_elements);
          expected +=
              wire_bytes(piece.format.between, DType::float32, values_of(own_node, own_local, piece).num_elements);
        }
      }
      if (node != own_node) {
        sends.push_back({owner(node, own_local), message, static_cast<std::size_t>(wire - message)});
        recvs.push_back({owner(node, own_local), second_in.data(node, chunk), expected});
      }
    }
    {
      const Timed timed(r.stats.codec_time);
      r.codec.decode_sum_encode(forwards, r.stream);
    }
    second_hop[chunk] = start_transfer(r, sends, recvs);
    const Timed timed(r.stats.codec_time);  // while the second hop is under way
    r.codec.decode_sum(sums, r.stream);
    r.codec.decode_sum_encode(residuals.updates(), r.stream);
  };

  const auto sum_nodes = [&](std::int64_t chunk) {
    finish_transfer(r, second_hop[chunk]);
    terms.clear();
    sums.clear();
    terms.reserve(chunks[chunk].size() * static_cast<std::size_t>(num_nodes));
    std::size_t offset = 0;
    std::size_t partial_offset = 0;
    for (const auto& piece : chunks[chunk]) {
      const TensorView values = output.slice(piece.begin, piece.count);
      const std::size_t first_term = terms.size();
      for (int node = 0; node < num_nodes; ++node) {
        terms.push_back(node == own_node
                            ? Wire{partial.data(0, chunk) + partial_offset, {}, DType::float32}
                            : Wire{second_in.data(node, chunk) + offset, piece.format.between, DType::float32});
      }
      offset += wire_bytes(piece.format.between, DType::float32, values.num_elements);
      partial_offset += wire_bytes({}, DType::float32, values.num_elements);
      sums.push_back({std::span(terms).subspan(first_term), factor, values});
    }
    const Timed timed(r.stats.codec_time);
    r.codec.decode_sum(sums, r.stream);
  };

  run_pipeline(chunks.count(), encode_and_send_inside, sum_and_send_between, sum_nodes);
}

}  // namespace

void reduce_scatter(const Resources& r, Slots slots, TensorView output, ReduceSegments segments, float factor,
                    const Feedback* feedback) {
  const HopChunks chunks(r.chunk_bytes, r.transport.size(), segments, output.dtype, Residuals::granule(feedback));
  if (chunks.count() == 0) return;
  Residuals residuals(r.topology, r.transport.rank(), slots, chunks, feedback);
  if (r.topology.is_hierarchical()) {
    reduce_scatter_hierarchical(r, slots, output, chunks, factor, residuals);
  } else {
    reduce_scatter_flat(r, slots, output, chunks, factor, residuals);
  }
}

}  // namespace zcomm
