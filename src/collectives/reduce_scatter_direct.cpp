#include "counted.hpp"
#include "message.hpp"
#include "reduce_scatter.hpp"

namespace zcomm {
namespace {

class DirectReduceScatter final : public Stages {
 public:
  DirectReduceScatter(const Resources& r, const Reduction& call)
      : r_(r),
        call_(call),
        plan_(call.plan),
        size_(plan_.topology().size()),
        incoming_(r, size_, plan_.largest_bytes(Link::inter_node, call.output.dtype), kDepth) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  static constexpr int kDepth = 2;  // chunks in progress

  // Returns this rank's contribution to `owner`: the pieces of a chunk lie side by side.
  ConstTensorView values(int owner, std::int64_t chunk) const {
    const std::span<const Piece<HopFormats>> pieces = plan_.pieces(chunk);
    const std::int64_t end = pieces.back().begin + pieces.back().count;
    return call_.slots[static_cast<std::size_t>(owner)].slice(pieces.front().begin, end - pieces.front().begin);
  }

  void first_hop(std::int64_t chunk) override {
    sends_.clear();
    recvs_.clear();
    for (const Move& move : plan_.hop(0).sends) {
      const ConstTensorView sent = values(move.slot, chunk);
      sends_.push_back({move.peer, sent.data, sent.num_bytes()});
    }
    for (const auto& [peer, slot] : plan_.hop(0).recvs) {
      recvs_.push_back(incoming_.recv(peer, peer, chunk, values(slot, chunk).num_bytes()));
    }
    transfers_[chunk] = start_transfer(r_, sends_, recvs_);
  }

  void finish(std::int64_t chunk) override {
    wait_for_transfer(r_, *transfers_[chunk]);
    terms_.clear();
    const ConstTensorView own = values(plan_.rank(), chunk);
    for (int peer = 0; peer < size_; ++peer) {
      terms_.push_back(exact_wire(
          peer == plan_.rank() ? own : ConstTensorView{incoming_.data(peer, chunk), own.num_elements, own.dtype}));
    }
    const std::int64_t begin = plan_.pieces(chunk).front().begin;
    const DecodeSum sum{terms_, call_.factor, call_.output.slice(begin, own.num_elements), call_.read_late};
    run_codec(r_, std::span(&sum, 1));
    transfers_[chunk].reset();
  }

  const Resources& r_;
  const Reduction call_;
  const ReducePlan& plan_;
  const int size_;
  ReceivedMessages incoming_;  // one message per rank
  Ring<std::unique_ptr<Transfer>> transfers_{kDepth};
  // Buffers reused by all chunks.
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
  std::vector<Wire> terms_;
};

}  // namespace

std::unique_ptr<Stages> direct_reduce_scatter(const Resources& resources, const Reduction& reduction) {
  return std::make_unique<DirectReduceScatter>(resources, reduction);
}

}  // namespace zcomm
