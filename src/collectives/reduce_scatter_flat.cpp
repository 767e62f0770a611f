#include "counted.hpp"
#include "random_seed.hpp"
#include "reduce_scatter.hpp"

namespace zcomm {
namespace {

class FlatReduceScatter final : public Stages {
 public:
  FlatReduceScatter(const Resources& r, const Reduction& call)
      : r_(r),
        call_(call),
        plan_(call.plan),
        dtype_(plan_.slots().dtype),
        window_(window_of(r, message_bytes() * plan_.slots().lengths.size(), plan_.num_chunks())),
        outgoing_(r, plan_.topology().size(), message_bytes(), window_ + 1),
        incoming_(r, plan_.topology().size(), message_bytes(), window_ + 1),
        residuals_(plan_, call.feedback) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int window() const override { return window_; }

 private:
  std::size_t message_bytes() const {
    return std::max(plan_.largest_bytes(Link::intra_node, dtype_), plan_.largest_bytes(Link::inter_node, dtype_));
  }
  Link link(int peer) const { return plan_.topology().link(plan_.rank(), peer); }

  // Sends each message while the next one is encoded, on transports that start transfers at once: peers then know the
  // destination of bytes before they arrive. On others all messages are encoded in one call.
  void first_hop(std::int64_t chunk) override {
    terms_.clear();
    residuals_.begin_chunk();
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
      MessageWriter message(outgoing_.data(move.peer, chunk), dtype_);
      list_encodes(move.slot, chunk, message);
      sends_.push_back(message.send(move.peer));
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

  void meanwhile(std::int64_t) override { run_codec(r_, residuals_.updates()); }

  // Lists the jobs that fill the message to the owner of a slot.
  void list_encodes(int owner, std::int64_t chunk, MessageWriter& message) {
    const std::span<const Piece<HopFormats>> pieces = plan_.pieces(chunk);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const ConstTensorView values = call_.values(owner, pieces[i]);
      const BlockFormat format = pieces[i].format.on(link(owner));
      const Rounding rounding = rounding_of(r_, owner, pieces[i], format);
      std::byte* const wire = message.next(format, values.num_elements);
      if (plan_.has_residual(owner, format)) {
        terms_.begin_sum();
        terms_.add(exact_wire(values));
        residuals_.encode(owner, chunk, i, terms_, {{}, values.num_elements, format, wire, rounding},
                          encodes_with_residual_);
      } else {
        encodes_.push_back({values, format, wire, rounding});
      }
    }
  }

  void finish(std::int64_t chunk) override {
    for (std::unique_ptr<Transfer>& transfer : transfers_[chunk]) wait_for_transfer(r_, *transfer);
    terms_.clear();
    sums_.clear();
    messages_.clear();
    const int size = plan_.topology().size();
    for (int peer = 0; peer < size; ++peer) messages_.emplace_back(incoming_.data(peer, chunk), dtype_);
    for (const Piece<HopFormats>& piece : plan_.pieces(chunk)) {
      const ConstTensorView own = call_.values(plan_.rank(), piece);
      terms_.begin_sum();
      for (int peer = 0; peer < size; ++peer) {
        terms_.add(peer == plan_.rank()
                       ? exact_wire(own)
                       : messages_[static_cast<std::size_t>(peer)].next(piece.format.on(link(peer)), own.num_elements));
      }
      sums_.push_back({terms_.sum(), call_.factor, call_.output.slice(piece.begin, piece.count), call_.read_late});
    }
    run_codec(r_, sums_);
    transfers_[chunk].clear();
  }

  const Resources& r_;
  const Reduction call_;
  const ReducePlan& plan_;
  const DType dtype_;
  const int window_;
  const MessageBuffers outgoing_;  // one message per rank
  ReceivedMessages incoming_;
  Residuals residuals_;
  Ring<std::vector<std::unique_ptr<Transfer>>> transfers_{window_ + 1};
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Encode> encodes_;
  std::vector<DecodeSumEncode> encodes_with_residual_;
  std::vector<DecodeSum> sums_;
  std::vector<MessageReader> messages_;
  TermList terms_;
};

}  // namespace

std::unique_ptr<Stages> flat_reduce_scatter(const Resources& resources, const Reduction& reduction) {
  return std::make_unique<FlatReduceScatter>(resources, reduction);
}

}  // namespace zcomm
