#include "lossless_messages.hpp"

#include "counted.hpp"

namespace zcomm {
namespace {

class Messages final : public LosslessMessages {
 public:
  Messages(const Resources& r, const LosslessShard& shard)
      : LosslessMessages(shard.kept.generation, r.stream),
        of_(shard),
        sent_(r, holders().empty() ? 0 : 1, longest(), kDepth) {
    kept_from = shard.shard.data;
  }

  std::size_t longest() const override { return most_bytes(of_.plan.longest_chunk()); }

  void list(const Resources& r, std::int64_t chunk, const MessageBuffers& received, std::vector<Send>& sends,
            std::vector<Recv>& recvs) override {
    EncodeLossless job = of_.encoding(chunk, base);
    std::uint64_t num_bytes = 0;
    if (!holders().empty()) {
      job.message = sent_.data(0, chunk);
      job.num_bytes = &num_bytes;
    }
    run_codec(r, {&job, 1});
    sent_bytes += num_bytes;
    for (const Move& move : holders()) sends.push_back({move.peer, job.message, num_bytes, /*has_limit=*/true});
    for (std::size_t i = 0; i < owners().size(); ++i) {
      const std::size_t most = most_bytes(kept(i, chunk).num_elements);
      recvs.push_back({owners()[i].peer, received.data(static_cast<int>(i), chunk), most, /*is_limit=*/true});
    }
  }

  std::size_t received_bytes(std::size_t owner, std::int64_t chunk, const std::byte* message) const override {
    const LosslessHeader header = checked_header(message, owners()[owner].slot, base, kept(owner, chunk));
    return kLosslessHeaderBytes + header.body_bytes;
  }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages are in flight

  const std::vector<Move>& holders() const { return of_.plan.inter_node_hop().sends; }
  const std::vector<Move>& owners() const { return of_.plan.inter_node_hop().recvs; }
  TensorView kept(std::size_t owner, std::int64_t chunk) const {
    return kept_chunk(of_.plan, of_.kept, owners()[owner].slot, chunk).values;
  }

  const LosslessShard of_;
  const MessageBuffers sent_;
};

}  // namespace

std::unique_ptr<LosslessMessages> make_messages(const Resources& r, const LosslessShard& shard) {
  return std::make_unique<Messages>(r, shard);
}

}  // namespace zcomm
