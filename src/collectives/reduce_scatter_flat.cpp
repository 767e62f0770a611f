#include <algorithm>

#include "reduce_scatter.hpp"

namespace zcomm {
namespace {

class FlatReduceScatter final : public ReduceStages {
 public:
  FlatReduceScatter(const Resources& r, const ReducePlan& plan, const Arguments& arguments, bool read_late)
      : ReduceStages(r, plan, arguments, read_late),
        window_(window_of(r, message_bytes() * plan_.slots().lengths.size(), plan_.num_chunks())),
        outgoing_(r, plan_.topology().size(), message_bytes(), window_ + 1),
        incoming_(r, plan_.topology().size(), message_bytes(), window_ + 1) {}

  int window() const override { return window_; }

 private:
  std::size_t message_bytes() const {
    return std::max(plan_.largest_bytes(Link::intra_node, dtype_), plan_.largest_bytes(Link::inter_node, dtype_));
  }
  Link link(int peer) const { return plan_.topology().link(plan_.rank(), peer); }

  // Sends each message while the next one is encoded, on transports that start transfers at once: peers then know the
  // destination of bytes before they arrive. On others all messages are encoded in one call.
  void first_hop(std::int64_t chunk) override {
    // Of each sum with a residual: the values, the residual, and the wire.
    begin_sums(plan_.feedback() ? 3 * plan_.hop(0).sends.size() * plan_.pieces(chunk).size() : 0);
    updates_.clear();
    for (const auto& [peer, slot] : plan_.hop(0).recvs) {
      recvs_.push_back(incoming_.recv(peer, peer, chunk, plan_.num_bytes(slot, chunk, link(peer), dtype_)));
    }
    const bool one_by_one = r_.transport.starts_at_once();
    if (one_by_one) {
      transfers_[chunk].push_back(start_transfer(r_, {}, recvs_));
      recvs_.clear();
    }
    std::size_t num_left = plan_.hop(0).sends.size();
    for (const Move& move : plan_.hop(0).sends) {
      std::byte* const message = outgoing_.data(move.peer, chunk);
      list_encodes(move.slot, chunk, message);
      sends_.push_back({move.peer, message, plan_.num_bytes(move.slot, chunk, link(move.peer), dtype_)});
      if (--num_left == 0 || one_by_one) start_listed(chunk);
    }
  }

  // Encodes the listed jobs, starts the listed messages, and clears both lists.
  void start_listed(std::int64_t chunk) {
    run_codec(r_, encodes_);
    run_codec(r_, encodes_with_residual_);
    transfers_[chunk].push_back(start_transfer(r_, sends_, recvs_));
    encodes_.clear();
    encodes_with_residual_.clear();
    sends_.clear();
    recvs_.clear();
  }

  void meanwhile(std::int64_t) override { run_codec(r_, updates_); }

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
      messages_.push_back(peer == plan_.rank() ? nullptr : incoming_.received(peer, chunk));
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
    run_codec(r_, sums_);
    transfers_[chunk].clear();
  }

  const int window_;
  const MessageBuffers outgoing_;  // one message per rank
  MessageBuffers incoming_;
  Ring<std::vector<std::unique_ptr<Transfer>>> transfers_{window_ + 1};
  std::vector<DecodeSumEncode> encodes_with_residual_;
};

}  // namespace

std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const ReducePlan& plan,
                                            const Arguments& arguments, bool read_late) {
  return std::make_unique<FlatReduceScatter>(resources, plan, arguments, read_late);
}

}  // namespace zcomm
