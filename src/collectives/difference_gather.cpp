// Gathers by lossless differences in host memory; device_gathers.cpp has those on GPUs.
#include "difference_gather.hpp"

#include "difference_errors.hpp"
#include "message.hpp"
#include "node_gather.hpp"

namespace zcomm {
namespace {

// Gathers from the owners of slots to their holders in other nodes, then within the nodes. A message is a header and a
// body. The receiver does not know its size and has room for the longest one.
class DifferenceGather final : public Stages {
 public:
  DifferenceGather(const Resources& r, const DifferencePlan& plan, ConstTensorView shard,
                   std::span<const TensorView> slots, Kept& kept)
      : r_(r),
        plan_(plan),
        codec_(*r.codec.differences()),
        shard_(shard),
        kept_(kept),
        base_(kept.generation),
        node_gather_(r, plan, kept, slots, shard.data),
        sent_(r, holders().empty() ? 0 : 1, most_bytes(plan.longest_chunk()), kDepth),
        received_(r, static_cast<int>(owners().size()), most_bytes(plan.longest_chunk()), kDepth) {
    kept_.generation = 0;
    kept_.hashes.resize(static_cast<std::size_t>(plan_.num_held() * plan_.num_chunks()));
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return 2; }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages have arrived

  // Returns the longest message. Whole values take no more than their longest difference.
  static std::size_t most_bytes(std::int64_t num_elements) {
    return kDifferenceHeaderBytes + max_difference_bytes(num_elements);
  }
  const std::vector<Move>& holders() const { return plan_.inter_node_hop().sends; }
  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }
  std::uint64_t& hash(int slot, std::int64_t chunk) { return kept_.hashes[node_gather_.hash_number(slot, chunk)]; }

  // Encodes this rank's values for other nodes, and sends plain values to the ranks of its node.
  void first_hop(std::int64_t chunk) override;
  // Decodes messages of other nodes, and sends the values to the ranks of its node.
  void second_hop(std::int64_t chunk) override;
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  void end() override {
    kept_.sent_bytes = sent_bytes_;
    kept_.generation = base_ + 1;
  }
  // Encodes and keeps this rank's values. Returns the bytes of the message; 0 if no other node holds this slot.
  std::size_t encode(std::int64_t chunk);
  void copy(ConstTensorView values, TensorView target) const;
  // Updates the kept values from a message, and checks that they equal their owner's.
  void update(int slot, std::int64_t chunk, const std::byte* message);

  const Resources& r_;
  const DifferencePlan& plan_;
  const DifferenceCodec& codec_;
  const ConstTensorView shard_;
  Kept& kept_;
  const std::uint64_t base_;  // the generation that differences refer to; 0: whole values are sent
  NodeGather node_gather_;
  const MessageBuffers sent_;
  const MessageBuffers received_;
  Ring<std::unique_ptr<Transfer>, kDepth> exchanged_;
  std::uint64_t sent_bytes_ = 0;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
};

void DifferenceGather::first_hop(std::int64_t chunk) {
  const std::size_t num_bytes = encode(chunk);
  sends_.clear();
  recvs_.clear();
  for (const Move& move : holders()) sends_.push_back({move.peer, sent_.data(0, chunk), num_bytes});
  for (std::size_t i = 0; i < owners().size(); ++i) {
    const std::size_t most = most_bytes(node_gather_.kept(owners()[i].slot, chunk).num_elements);
    recvs_.push_back({owners()[i].peer, received_.data(static_cast<int>(i), chunk), most, /*is_limit=*/true});
  }
  exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
  node_gather_.start_own(chunk);
}

std::size_t DifferenceGather::encode(std::int64_t chunk) {
  const ConstTensorView values = shard_.slice(plan_.chunk(chunk).begin, plan_.chunk(chunk).count);
  const TensorView base = node_gather_.kept(plan_.rank(), chunk);
  std::uint64_t& own_hash = hash(plan_.rank(), chunk);
  const Timed timed(r_.stats.codec_time, begin_range(r_, "zcomm::encode"));
  if (holders().empty()) {
    copy(values, base);
    own_hash = codec_.hash(base);
    return 0;
  }
  std::byte* const message = sent_.data(0, chunk);
  std::byte* const body = message + kDifferenceHeaderBytes;
  DifferenceHeader header;
  if (base_ == 0) {
    copy(values, base);
    copy(values, {body, values.num_elements, values.dtype});
    header.body_bytes = base.num_bytes();
    header.result_hash = codec_.hash(base);
  } else {
    const DifferenceCodec::Encoded encoded = codec_.encode(values, base, body);
    header = {DifferenceHeader::Kind::difference, encoded.num_bytes, base_, own_hash, encoded.hash};
  }
  own_hash = header.result_hash;
  write_header(header, message);
  sent_bytes_ += kDifferenceHeaderBytes + header.body_bytes;
  return kDifferenceHeaderBytes + header.body_bytes;
}

void DifferenceGather::copy(ConstTensorView values, TensorView target) const {
  const Decode job{{values.data, {}, values.dtype}, target};
  r_.codec.decode({&job, 1}, r_.stream);
}

void DifferenceGather::second_hop(std::int64_t chunk) {
  finish_transfer(r_, exchanged_[chunk]);
  {
    const Timed timed(r_.stats.codec_time, begin_range(r_, "zcomm::decode"));
    for (std::size_t i = 0; i < owners().size(); ++i) {
      update(owners()[i].slot, chunk, received_.data(static_cast<int>(i), chunk));
    }
  }
  node_gather_.start_others(chunk);
}

void DifferenceGather::update(int slot, std::int64_t chunk, const std::byte* message) {
  const TensorView values = node_gather_.kept(slot, chunk);
  std::uint64_t& known_hash = hash(slot, chunk);
  const DifferenceHeader header = checked_header(message, slot, base_, values);
  if (base_ > 0 && header.base_hash != known_hash) throw TransportError(other_base(slot, base_));
  const std::byte* const body = message + kDifferenceHeaderBytes;
  std::uint64_t result = 0;
  if (base_ == 0) {
    copy({body, values.num_elements, values.dtype}, values);
    result = codec_.hash(values);
  } else {
    try {
      result = codec_.decode({body, header.body_bytes}, values);
    } catch (const Error& error) {
      throw TransportError(other_result(slot, base_, error.what()));
    }
  }
  if (result != header.result_hash) throw TransportError(other_result(slot, base_, kStrayWrite));
  known_hash = result;
}

// Gathers kept values again, within the node.
class NodeGatherAgain final : public Stages {
 public:
  NodeGatherAgain(const Resources& r, const DifferencePlan& plan, const Kept& kept, std::span<const TensorView> slots)
      : r_(r), plan_(plan), codec_(*r.codec.differences()), kept_(kept), node_gather_(r, plan, kept, slots) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  // Checks values and passes them on.
  void first_hop(std::int64_t chunk) override {
    for (int slot = 0; slot < r_.world.topology.size(); ++slot) {
      if (plan_.place(slot) < 0) continue;
      const Timed timed(r_.stats.codec_time);
      if (codec_.hash(node_gather_.kept(slot, chunk)) != kept_.hashes[node_gather_.hash_number(slot, chunk)]) {
        throw TransportError(written_to(slot, kept_.generation, plan_.rank()));
      }
    }
    node_gather_.start(chunk);
  }
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }

  const Resources& r_;
  const DifferencePlan& plan_;
  const DifferenceCodec& codec_;
  const Kept& kept_;
  NodeGather node_gather_;
};

}  // namespace

std::unique_ptr<Stages> difference_stages(const Resources& resources, const ShardDifference& shard,
                                          std::span<const TensorView> slots) {
  return std::make_unique<DifferenceGather>(resources, shard.plan, shard.shard, slots, shard.kept);
}

std::unique_ptr<Stages> kept_stages(const Resources& resources, const DifferencePlan& plan, const Kept& kept,
                                    std::span<const TensorView> slots) {
  return std::make_unique<NodeGatherAgain>(resources, plan, kept, slots);
}

}  // namespace zcomm
