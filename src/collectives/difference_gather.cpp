// On a CPU. device_gathers.cpp is for GPUs.
#include "difference_errors.hpp"
#include "message.hpp"
#include "node_gather.hpp"

namespace zcomm {
namespace {

// From the owners of slots to their holders in other nodes, then inside the nodes. A message is a header and a body.
// Its receiver does not know its size, and has room for the longest one.
class DifferenceGather final : public Stages {
 public:
  DifferenceGather(const Resources& r, const DifferencePlan& plan, ConstTensorView shard,
                   std::span<const TensorView> slots, KeptShards& kept)
      : r_(r),
        plan_(plan),
        codec_(*r.codec.differences()),
        shard_(shard),
        kept_(kept),
        base_(kept.generation),
        node_gather_(r, plan, kept, slots, shard.data),
        sent_(r, holders().empty() ? 0 : 1, most_bytes(plan.longest_chunk()), kDepth),
        received_(r, static_cast<int>(owners().size()), most_bytes(plan.longest_chunk()), kDepth) {}

  void run() {
    kept_.generation = 0;
    kept_.hashes.resize(static_cast<std::size_t>(plan_.num_held() * plan_.num_chunks()));
    run_pipeline(r_, *this);
    kept_.sent_bytes = sent_bytes_;
    kept_.generation = base_ + 1;
  }

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }
  int num_hops() const override { return 2; }

 private:
  static constexpr int kDepth = 2;  // chunks whose messages are there

  // Of a message. Whole values take no more than their longest difference.
  static std::size_t most_bytes(std::int64_t num_elements) {
    return kDifferenceHeaderBytes + max_difference_bytes(num_elements);
  }
  const std::vector<Move>& holders() const { return plan_.inter_node_hop().sends; }
  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }
  std::uint64_t& hash(int slot, std::int64_t chunk) { return kept_.hashes[node_gather_.hash_number(slot, chunk)]; }

  // Encodes this rank's values, sends them to other nodes and, unencoded, to the ranks of its node.
  void first_hop(std::int64_t chunk) override;
  // Decodes what came from other nodes, and sends the values to the ranks of its node.
  void second_hop(std::int64_t chunk) override;
  void finish(std::int64_t chunk) override { node_gather_.finish(chunk); }
  // Also keeps this rank's values. Returns the bytes of the message; 0 if no other node holds this slot.
  std::size_t encode(std::int64_t chunk);
  void copy(ConstTensorView values, TensorView target) const;
  // Brings what is kept up to date, and checks that it is what its owner has.
  void update(int slot, std::int64_t chunk, const std::byte* message);

  const Resources& r_;
  const DifferencePlan& plan_;
  const DifferenceCodec& codec_;
  const ConstTensorView shard_;
  KeptShards& kept_;
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
  const Timed timed(r_.stats.codec_time);
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
    const Timed timed(r_.stats.codec_time);
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

// Inside a node, of what is kept.
class NodeGatherAgain final : public Stages {
 public:
  NodeGatherAgain(const Resources& r, const DifferencePlan& plan, const KeptShards& kept,
                  std::span<const TensorView> slots)
      : r_(r), plan_(plan), codec_(*r.codec.differences()), kept_(kept), node_gather_(r, plan, kept, slots) {}

  std::int64_t num_chunks() const override { return plan_.num_chunks(); }

 private:
  // Checks, and hands on.
  void first_hop(std::int64_t chunk) override {
    for (int slot = 0; slot < r_.topology.size(); ++slot) {
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
  const KeptShards& kept_;
  NodeGather node_gather_;
};

}  // namespace

void all_gather(const Resources& resources, const DifferencePlan& plan, ConstTensorView shard,
                std::span<const TensorView> slots, KeptShards& kept) {
  DifferenceGather(resources, plan, shard, slots, kept).run();
}

void gather_secondary(const Resources& resources, const DifferencePlan& plan, const KeptShards& kept,
                      std::span<const TensorView> slots) {
  NodeGatherAgain gather(resources, plan, kept, slots);
  run_pipeline(resources, gather);
}

}  // namespace zcomm
