// Stages of reductions: one hop, or two.
#include <algorithm>
#include <vector>

#include "random_seed.hpp"
#include "reduce_scatter.hpp"

namespace zcomm {
namespace {

// What both variants of a reduce_scatter share: lists of codec jobs, which all chunks reuse, and error feedback.
class ReduceStages : public Stages {
 public:
  ReduceStages(const Resources& r, const ReducePlan& plan, const Arguments& arguments, bool read_late)
      : r_(r),
        plan_(plan),
        dtype_(plan.slots().dtype),
        arguments_(arguments),
        read_late_(read_late),
        inputs_(arguments.inputs, plan.slots().lengths.size()) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 protected:
  // Returns the depth of buffers for `depth` chunks in progress; a call may have fewer.
  int in_progress(int depth) const { return static_cast<int>(std::min<std::int64_t>(depth, plan_.num_chunks())); }
  // Returns the place of another rank's message, or node's, where there is none of the own one.
  static int place_among_others(int other, int own) { return other < own ? other : other - 1; }

  static Wire exact_wire(ConstTensorView values) { return {values.data, {}, values.dtype}; }

  // Begins a list of sums. It reserves `most_terms`, those of all sums together, so that spans of them stay valid.
  void begin_sums(std::size_t most_terms) {
    terms_.clear();
    terms_.reserve(most_terms);
    sums_.clear();
    messages_.clear();
  }
  // Adds the next wire of messages_[message] to the terms.
  void add_term(int message, BlockFormat format, DType dtype, std::int64_t num_elements) {
    const std::byte*& next = messages_[static_cast<std::size_t>(message)];
    terms_.push_back({take_wire(next, format, dtype, num_elements), format, dtype});
  }
  std::span<const Wire> terms_from(std::size_t first) const { return std::span(terms_).subspan(first); }
  // Lists the sum of the terms from `first` on as a piece of the output.
  void list_output(const Piece<HopFormats>& piece, std::size_t first) {
    const TensorView values = arguments_.outputs.front().slice(piece.begin, piece.count);
    sums_.push_back({terms_from(first), arguments_.factor, values, read_late_});
  }
  // Adds the residual, if there is one, to the terms from `first` on, piece `index` of a chunk of `owner`'s slot. Adds
  // the encoding of their sum to `jobs`, and the update of the residual to updates_: the sum minus its wire. Takes up
  // to two more terms.
  void encode_sum(std::size_t first, int owner, std::int64_t chunk, std::size_t index, DecodeSumEncode job,
                  std::vector<DecodeSumEncode>& jobs) {
    job.wires = terms_from(first);
    if (!plan_.has_residual(owner, job.format)) return jobs.push_back(job);
    const Feedback& feedback = *arguments_.feedback;
    std::byte* const residual = feedback.residual + plan_.residual_offset(owner, chunk, index);
    if (!feedback.empty) {
      // Counts NaN as 0, so that a block that overflowed recovers.
      terms_.push_back({residual, feedback.format, DType::float32, feedback.decay, true});
    }
    job.wires = terms_from(first);
    jobs.push_back(job);
    terms_.push_back({job.wire, job.format, DType::float32, -1.0f});
    updates_.push_back({terms_from(first), job.num_elements, feedback.format, residual, {}});
  }

  const Resources& r_;
  const ReducePlan& plan_;
  const DType dtype_;
  const Arguments arguments_;
  const bool read_late_;
  const SlotViews<ConstTensorView> inputs_;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<DecodeSum> sums_;
  std::vector<DecodeSumEncode> updates_;    // of residuals
  std::vector<const std::byte*> messages_;  // what is left of each
  std::vector<Wire> terms_;
};

// Makes one hop to the owners. Each pair of ranks uses the format of its link.
class FlatReduceScatter final : public ReduceStages {
 public:
  FlatReduceScatter(const Resources& r, const ReducePlan& plan, const Arguments& arguments, bool read_late)
      : ReduceStages(r, plan, arguments, read_late),
        window_(window_of(r, message_bytes() * plan_.slots().lengths.size(), plan_.num_chunks())),
        outgoing_(r, plan_.topology().size() - 1, message_bytes(), in_progress(window_ + 1)),
        incoming_(r, plan_.topology().size() - 1, message_bytes(), in_progress(window_ + 1)) {}

  int window() const override { return window_; }

 private:
  std::size_t message_bytes() const {
    return std::max(plan_.largest_bytes(Link::intra_node, dtype_), plan_.largest_bytes(Link::inter_node, dtype_));
  }
  Link link(int peer) const { return plan_.topology().link(plan_.rank(), peer); }
  int place(int peer) const { return place_among_others(peer, plan_.rank()); }

  // Sends each message while the next one is encoded, on transports that start transfers at once: peers then know the
  // destination of bytes before they arrive. On others all messages are encoded in one call.
  void first_hop(std::int64_t chunk) override {
    // Of each sum with a residual: the values, the residual, and the wire.
    begin_sums(plan_.feedback() ? 3 * plan_.hop(0).sends.size() * plan_.pieces(chunk).size() : 0);
    updates_.clear();
    for (const auto& [peer, slot] : plan_.hop(0).recvs) {
      recvs_.push_back(incoming_.recv(peer, place(peer), chunk, plan_.num_bytes(slot, chunk, link(peer), dtype_)));
    }
    const bool one_by_one = !r_.transport.is_stream_ordered();
    if (one_by_one) {
      transfers_[chunk].push_back(start_transfer(r_, {}, recvs_));
      recvs_.clear();
    }
    std::size_t num_left = plan_.hop(0).sends.size();
    for (const Move& move : plan_.hop(0).sends) {
      std::byte* const message = outgoing_.data(place(move.peer), chunk);
      list_encodes(move.slot, chunk, message);
      sends_.push_back({move.peer, message, plan_.num_bytes(move.slot, chunk, link(move.peer), dtype_)});
      if (--num_left == 0 || one_by_one) start_listed(chunk);
    }
  }

  // Encodes the listed jobs, starts the listed messages, and clears both lists.
  void start_listed(std::int64_t chunk) {
    run_beside(r_, encodes_);
    run_beside(r_, encodes_with_residual_);
    transfers_[chunk].push_back(start_transfer(r_, sends_, recvs_));
    encodes_.clear();
    encodes_with_residual_.clear();
    sends_.clear();
    recvs_.clear();
  }

  void meanwhile(std::int64_t) override { run_beside(r_, updates_); }

  // Lists the jobs that fill the message to the owner of a slot.
  void list_encodes(int owner, std::int64_t chunk, std::byte* message) {
    const std::span<const Piece<HopFormats>> pieces = plan_.pieces(chunk);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const ConstTensorView values = inputs_(owner, pieces[i]);
      const BlockFormat format = pieces[i].format.on(link(owner));
      const Rounding rounding = rounding_of(r_, owner, pieces[i], format);
      std::byte* const wire = take_wire(message, format, dtype_, values.num_elements);
      if (plan_.has_residual(owner, format)) {
        terms_.push_back(exact_wire(values));
        encode_sum(terms_.size() - 1, owner, chunk, i, {{}, values.num_elements, format, wire, rounding},
                   encodes_with_residual_);
      } else {
        encodes_.push_back({values, format, wire, rounding});
      }
    }
  }

  void finish(std::int64_t chunk) override {
    for (std::unique_ptr<Transfer>& transfer : transfers_[chunk]) wait_for_transfer(r_, *transfer);
    const int size = plan_.topology().size();
    begin_sums(static_cast<std::size_t>(size) * plan_.pieces(chunk).size());
    for (int peer = 0; peer < size; ++peer) {
      messages_.push_back(peer == plan_.rank() ? nullptr : incoming_.received(place(peer), chunk));
    }
    for (const Piece<HopFormats>& piece : plan_.pieces(chunk)) {
      const std::size_t first = terms_.size();
      const ConstTensorView own = inputs_(plan_.rank(), piece);
      for (int peer = 0; peer < size; ++peer) {
        if (peer == plan_.rank()) {
          terms_.push_back(exact_wire(own));
        } else {
          add_term(peer, piece.format.on(link(peer)), dtype_, own.num_elements);
        }
      }
      list_output(piece, first);
    }
    run_beside(r_, sums_);
    transfers_[chunk].clear();
  }

  const int window_;
  const MessageBuffers outgoing_;  // one message per other rank
  MessageBuffers incoming_;
  Ring<std::vector<std::unique_ptr<Transfer>>> transfers_{window_ + 1};
  std::vector<DecodeSumEncode> encodes_with_residual_;
};

// Makes two hops. A rank first sums, over its node, the slots of all ranks with its local rank, one per node. Then it
// sends each sum to the node of its owner.
//
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
        first_out_(r, node_size_ - 1, first_bytes(), in_progress(kFirstDepth)),
        first_in_(r, node_size_ - 1, first_bytes(), in_progress(kFirstDepth)),
        second_out_(r, num_nodes_ - 1, second_bytes(), in_progress(kSecondDepth)),
        second_in_(r, num_nodes_ - 1, second_bytes(), in_progress(kSecondDepth)),
        partial_(r, 1, plan_.largest_sum_bytes(), in_progress(kSecondDepth)) {}

  int num_hops() const override { return 2; }
  // Sums while a group is in flight. Transports that start at once have the next chunk of the first hop in flight
  // anyway.
  int second_hop_delay() const override {
    return r_.transport.is_stream_ordered() && num_chunks() > 1 ? kLongestDelay : 1;
  }

 private:
  static constexpr int kLongestDelay = 2;
  // Chunks in progress, in each hop.
  static constexpr int kFirstDepth = kLongestDelay + 1;
  static constexpr int kSecondDepth = 2;

  std::size_t first_bytes() const {
    return plan_.largest_bytes(Link::intra_node, dtype_) * static_cast<std::size_t>(num_nodes_);
  }

  std::size_t second_bytes() const { return plan_.largest_bytes(Link::inter_node, DType::float32); }
  int place(int local) const { return place_among_others(local, own_local_); }
  int place_of_node(int node) const { return place_among_others(node, own_node_); }

  void first_hop(std::int64_t chunk) override {  // within the node
    encodes_.clear();
    sends_.clear();
    recvs_.clear();
    // Moves to and from a peer are adjacent, one per node.
    const Hop& hop = plan_.hop(0);
    const auto nodes = static_cast<std::size_t>(num_nodes_);
    for (std::size_t first = 0; first < hop.sends.size(); first += nodes) {
      const int peer = hop.sends[first].peer;
      std::byte* const message = first_out_.data(place(topology_.local_rank(peer)), chunk);
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
      recvs_.push_back({peer, first_in_.data(place(topology_.local_rank(peer)), chunk), own_bytes});
    }
    run_beside(r_, encodes_);
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
    run_beside(r_, forwards_);
    second_hop_[chunk] = start_transfer(r_, sends_, recvs_, 1);
  }

  // Sums this rank's slot over its node, and updates the residuals of the other slots.
  void meanwhile(std::int64_t) override {
    run_beside(r_, sums_);
    run_beside(r_, updates_);
  }

  // Lists the sums over this rank's node. That of its own slot stays here; the others are encoded for other nodes.
  void list_sums(std::int64_t chunk) {
    const auto terms_of_sum = static_cast<std::size_t>(node_size_) + 2;  // with the residual and the wire
    begin_sums(static_cast<std::size_t>(num_nodes_) * plan_.pieces(chunk).size() * terms_of_sum);
    forwards_.clear();
    sends_.clear();
    recvs_.clear();
    updates_.clear();
    for (int local = 0; local < node_size_; ++local) {
      messages_.push_back(local == own_local_ ? nullptr : first_in_.data(place(local), chunk));
    }
    for (int node = 0; node < num_nodes_; ++node) {
      if (node == own_node_) {
        list_own_sums(chunk);
        continue;
      }
      const int owner = topology_.rank_of(node, own_local_);
      std::byte* const message = second_out_.data(place_of_node(node), chunk);
      list_forwards(owner, chunk, message);
      sends_.push_back({owner, message, plan_.num_bytes(owner, chunk, Link::inter_node, DType::float32)});
      recvs_.push_back({owner, second_in_.data(place_of_node(node), chunk),
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
      messages_.push_back(node == own_node_ ? partial_.data(0, chunk) : second_in_.data(place_of_node(node), chunk));
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
    run_beside(r_, sums_);
  }

  const Topology& topology_;
  const int own_node_;
  const int own_local_;
  const int num_nodes_;
  const int node_size_;
  const MessageBuffers first_out_;  // one message per other local rank
  const MessageBuffers first_in_;
  const MessageBuffers second_out_;  // one per other node
  const MessageBuffers second_in_;
  const MessageBuffers partial_;  // float32 sums of this rank's slot over its node
  Ring<std::unique_ptr<Transfer>> first_hop_{kFirstDepth};
  Ring<std::unique_ptr<Transfer>> second_hop_{kSecondDepth};
  std::vector<DecodeSumEncode> forwards_;
};

}  // namespace

std::unique_ptr<Stages> reduce_scatter_stages(const Resources& resources, const ReducePlan& plan,
                                              const Arguments& arguments, bool read_late) {
  if (plan.topology().is_hierarchical()) {
    return std::make_unique<HierarchicalReduceScatter>(resources, plan, arguments, read_late);
  }
  return std::make_unique<FlatReduceScatter>(resources, plan, arguments, read_late);
}

}  // namespace zcomm
