#include "reduce_scatter.hpp"

namespace zcomm {
namespace {

// Sends one wire per node to each local rank, in node order. This order is the transpose that brings every slot to its
// owner in the second hop.
class HierarchicalReduceScatter final : public ReduceStages {
 public:
  HierarchicalReduceScatter(const Resources& r, const ReducePlan& plan, const Arguments& arguments, bool read_late)
      : ReduceStages(r, plan, arguments, read_late),
        topology_(plan.topology()),
        own_node_(topology_.node(plan_.rank())),
        own_local_(topology_.local_rank(plan_.rank())),
        num_nodes_(topology_.num_nodes()),
        node_size_(static_cast<int>(topology_.ranks(own_node_).size())),
        first_out_(r, node_size_, first_bytes(), kFirstDepth),
        first_in_(r, node_size_, first_bytes(), kFirstDepth),
        second_out_(r, num_nodes_, plan_.largest_bytes(Link::inter_node, DType::float32), kSecondDepth),
        second_in_(r, num_nodes_, plan_.largest_bytes(Link::inter_node, DType::float32), kSecondDepth),
        partial_(r, 1, plan_.largest_sum_bytes(), kSecondDepth) {}

  int num_hops() const override { return 2; }
  // Sums while a group is in flight. With few chunks that is not worth another group, and transports that start at once
  // have the next chunk of the first hop in flight anyway.
  int second_hop_delay() const override {
    return r_.transport.starts_at_once() || num_chunks() < kLeastChunksOfDelay ? 1 : kLongestDelay;
  }

 private:
  static constexpr int kLongestDelay = 2;
  static constexpr std::int64_t kLeastChunksOfDelay = 4;
  // Chunks in progress, in each hop.
  static constexpr int kFirstDepth = kLongestDelay + 1;
  static constexpr int kSecondDepth = 2;

  std::size_t first_bytes() const {
    return plan_.largest_bytes(Link::intra_node, dtype_) * static_cast<std::size_t>(num_nodes_);
  }

  void first_hop(std::int64_t chunk) override {  // within the node
    encodes_.clear();
    sends_.clear();
    recvs_.clear();
    // Moves to and from a peer are adjacent, one per node.
    const Hop& hop = plan_.hop(0);
    const auto nodes = static_cast<std::size_t>(num_nodes_);
    for (std::size_t first = 0; first < hop.sends.size(); first += nodes) {
      const int peer = hop.sends[first].peer;
      std::byte* const message = first_out_.data(topology_.local_rank(peer), chunk);
      std::byte* end = message;
      for (const Move& move : std::span(hop.sends).subspan(first, nodes)) list_encodes(move.slot, chunk, end);
      sends_.push_back({peer, message, static_cast<std::size_t>(end - message)});
    }
    std::size_t own_bytes = 0;
    for (int node = 0; node < num_nodes_; ++node) {
      own_bytes += plan_.num_bytes(topology_.rank_of(node, own_local_), chunk, Link::intra_node, dtype_);
    }
    for (std::size_t first = 0; first < hop.recvs.size(); first += nodes) {
      const int peer = hop.recvs[first].peer;
      recvs_.push_back({peer, first_in_.data(topology_.local_rank(peer), chunk), own_bytes});
    }
    run_codec(r_, encodes_);
    first_hop_[chunk] = start_transfer(r_, sends_, recvs_);
  }

  void list_encodes(int owner, std::int64_t chunk, std::byte*& message) {
    for (const Piece<HopFormats>& piece : plan_.pieces(chunk)) {
      const ConstTensorView values = inputs_(owner, piece);
      const BlockFormat format = piece.format.on(Link::intra_node);
      std::byte* const wire = take_wire(message, format, dtype_, values.num_elements);
      encodes_.push_back({values, format, wire, rounding_of(r_, owner, piece, format)});
    }
  }

  void second_hop(std::int64_t chunk) override {  // sums over the node, to other nodes
    finish_transfer(r_, first_hop_[chunk]);
    list_sums(chunk);
    run_codec(r_, forwards_);
    second_hop_[chunk] = start_transfer(r_, sends_, recvs_, 1);
  }

  // Sums this rank's slot over its node, and updates the residuals of the other slots.
  void meanwhile(std::int64_t) override {
    run_codec(r_, sums_);
    run_codec(r_, updates_);
  }

  // Lists the sums over the own node: the own slot's stays here, the others are encoded again for other nodes.
  void list_sums(std::int64_t chunk) {
    const auto terms_of_sum = static_cast<std::size_t>(node_size_) + 2;  // with the residual and the wire
    begin_sums(static_cast<std::size_t>(num_nodes_) * plan_.pieces(chunk).size() * terms_of_sum);
    forwards_.clear();
    sends_.clear();
    recvs_.clear();
    updates_.clear();
    for (int local = 0; local < node_size_; ++local) messages_.push_back(first_in_.data(local, chunk));
    for (int node = 0; node < num_nodes_; ++node) {
      if (node == own_node_) {
        list_own_sums(chunk);
        continue;
      }
      const int owner = topology_.rank_of(node, own_local_);
      std::byte* const message = second_out_.data(node, chunk);
      list_forwards(owner, chunk, message);
      sends_.push_back({owner, message, plan_.num_bytes(owner, chunk, Link::inter_node, DType::float32)});
      recvs_.push_back({owner, second_in_.data(node, chunk),
                        plan_.num_bytes(plan_.rank(), chunk, Link::inter_node, DType::float32)});
    }
  }

  void list_own_sums(std::int64_t chunk) {
    std::byte* partial = partial_.data(0, chunk);
    for (const Piece<HopFormats>& piece : plan_.pieces(chunk)) {
      const std::size_t first = terms_.size();
      const std::int64_t count = list_terms(plan_.rank(), piece);
      std::byte* const sum = take_wire(partial, {}, DType::float32, count);
      sums_.push_back({terms_from(first), 1.0f, {sum, count, DType::float32}});
    }
  }

  void list_forwards(int owner, std::int64_t chunk, std::byte* message) {
    const std::span<const Piece<HopFormats>> pieces = plan_.pieces(chunk);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const BlockFormat format = pieces[i].format.on(Link::inter_node);
      const std::size_t first = terms_.size();
      const std::int64_t count = list_terms(owner, pieces[i]);
      std::byte* const wire = take_wire(message, format, DType::float32, count);
      encode_sum(first, owner, chunk, i, {{}, count, format, wire, rounding_of(r_, owner, pieces[i], format)},
                 forwards_);
    }
  }

  // Lists the contributions of this node's ranks to `owner`, in local-rank order. Returns the number of elements.
  std::int64_t list_terms(int owner, const Piece<HopFormats>& piece) {
    const ConstTensorView values = inputs_(owner, piece);
    for (int local = 0; local < node_size_; ++local) {
      if (local == own_local_) {
        terms_.push_back(exact_wire(values));
      } else {
        add_term(local, piece.format.on(Link::intra_node), dtype_, values.num_elements);
      }
    }
    return values.num_elements;
  }

  void finish(std::int64_t chunk) override {  // sums over the nodes
    finish_transfer(r_, second_hop_[chunk], 1);
    begin_sums(static_cast<std::size_t>(num_nodes_) * plan_.pieces(chunk).size());
    for (int node = 0; node < num_nodes_; ++node) {
      messages_.push_back(node == own_node_ ? partial_.data(0, chunk) : second_in_.data(node, chunk));
    }
    for (const Piece<HopFormats>& piece : plan_.pieces(chunk)) {
      const std::size_t first = terms_.size();
      const std::int64_t count = arguments_.outputs.front().slice(piece.begin, piece.count).num_elements;
      for (int node = 0; node < num_nodes_; ++node) {
        const BlockFormat format = node == own_node_ ? BlockFormat{} : piece.format.on(Link::inter_node);
        add_term(node, format, DType::float32, count);
      }
      list_output(piece, first);
    }
    run_codec(r_, sums_);
  }

  const Topology& topology_;
  const int own_node_;
  const int own_local_;
  const int num_nodes_;
  const int node_size_;
  const MessageBuffers first_out_;  // one message per local rank
  const MessageBuffers first_in_;
  const MessageBuffers second_out_;  // one per node
  const MessageBuffers second_in_;
  const MessageBuffers partial_;  // float32 sums of the own slot over the own node
  Ring<std::unique_ptr<Transfer>> first_hop_{kFirstDepth};
  Ring<std::unique_ptr<Transfer>> second_hop_{kSecondDepth};
  std::vector<DecodeSumEncode> forwards_;
};

}  // namespace

std::unique_ptr<Stages> hierarchical_reduce_scatter(const Resources& resources, const ReducePlan& plan,
                                                    const Arguments& arguments, bool read_late) {
  return std::make_unique<HierarchicalReduceScatter>(resources, plan, arguments, read_late);
}

}  // namespace zcomm
