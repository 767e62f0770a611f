// On a CPU. device_gathers.cpp is for GPUs.
#include <array>

#include "difference_errors.hpp"
#include "message.hpp"
#include "node_gather.hpp"

namespace zcomm {
namespace {

// From the owners of slots to their holders in other nodes, then inside the nodes. A header goes one stage ahead of its
// body, so that the receiver knows the size of that.
class DifferenceGather {
 public:
  DifferenceGather(const Resources& r, const DifferencePlan& plan, ConstTensorView shard,
                   std::span<const TensorView> slots, KeptShards& kept)
      : r_(r),
        plan_(plan),
        codec_(*r.codec.differences()),
        shard_(shard),
        kept_(kept),
        base_(kept.generation),
        most_bytes_(base_ == 0 ? 0 : max_difference_bytes(plan.longest_chunk())),
        node_gather_(r, plan, kept, slots),
        sent_(r, 1, most_bytes_, kDepth),
        received_(r, static_cast<int>(owners().size()), most_bytes_, kDepth) {
    for (int i = 0; i < kDepth; ++i) {
      messages_[i].headers.resize(owners().size());
      messages_[i].received_headers.resize(owners().size());
    }
  }

  void run() {
    kept_.generation = 0;
    kept_.hashes.resize(static_cast<std::size_t>(plan_.num_held() * plan_.num_chunks()));
    run_stages();
    kept_.sent_bytes = holders().empty() ? 0 : sent_bytes_;
    kept_.generation = base_ + 1;
  }

 private:
  static constexpr int kDepth = 4;  // stages
  using Header = std::array<std::byte, kDifferenceHeaderBytes>;
  // A chunk that is under way.
  struct Messages {
    Header header;  // of the own one
    const std::byte* body;
    std::size_t body_bytes;
    std::vector<Header> headers;                     // of each owner,
    std::vector<DifferenceHeader> received_headers;  // read
  };

  const std::vector<Move>& holders() const { return plan_.inter_node_hop().sends; }
  const std::vector<Move>& owners() const { return plan_.inter_node_hop().recvs; }
  std::uint64_t& hash(int slot, std::int64_t chunk) { return kept_.hashes[node_gather_.hash_number(slot, chunk)]; }

  // Where the body of the i-th owner arrives: a whole one where it is kept.
  std::byte* room(std::size_t i, std::int64_t chunk) const {
    return base_ == 0 ? node_gather_.kept(owners()[i].slot, chunk).data : received_.data(static_cast<int>(i), chunk);
  }
  void run_stages();
  void encode_and_announce(std::int64_t chunk);
  void encode(std::int64_t chunk, Messages& messages);
  void exchange(std::int64_t chunk);
  void decode_and_hand_on(std::int64_t chunk);
  void finish(std::int64_t chunk) { node_gather_.finish(chunk); }
  DifferenceHeader checked(const Header& wire, int slot, std::int64_t chunk);
  // Brings what is kept up to date, and checks that it is what its owner has.
  void update(int slot, std::int64_t chunk, const DifferenceHeader& header, const std::byte* body);

  const Resources& r_;
  const DifferencePlan& plan_;
  const DifferenceCodec& codec_;
  const ConstTensorView shard_;
  KeptShards& kept_;
  const std::uint64_t base_;  // the generation that differences refer to; 0: whole values are sent
  const std::size_t most_bytes_;
  NodeGather node_gather_;
  const MessageBuffers sent_;
  const MessageBuffers received_;
  Ring<Messages, kDepth> messages_;
  Ring<std::unique_ptr<Transfer>, kDepth> announced_;
  Ring<std::unique_ptr<Transfer>, kDepth> exchanged_;
  std::uint64_t sent_bytes_ = 0;
  std::vector<Send> sends_;
  std::vector<Recv> recvs_;
};

// As run_pipeline does it, but with three transfers, of which the second is started after a wait for the first: no
// group of a transport could have both.
void DifferenceGather::run_stages() {
  const std::int64_t num_chunks = plan_.num_chunks();
  for (std::int64_t step = 0; step < num_chunks + kDepth - 1; ++step) {
    const auto run = [&](auto stage, std::int64_t chunk) {
      if (chunk >= 0 && chunk < num_chunks) (this->*stage)(chunk);
    };
    run(&DifferenceGather::encode_and_announce, step);
    run(&DifferenceGather::exchange, step - 1);
    run(&DifferenceGather::decode_and_hand_on, step - 2);
    run(&DifferenceGather::finish, step - 3);
  }
}

void DifferenceGather::encode_and_announce(std::int64_t chunk) {
  Messages& messages = messages_[chunk];
  encode(chunk, messages);
  sends_.clear();
  recvs_.clear();
  for (const Move& move : holders()) sends_.push_back({move.peer, messages.header.data(), messages.header.size()});
  for (std::size_t i = 0; i < owners().size(); ++i) {
    recvs_.push_back({owners()[i].peer, messages.headers[i].data(), messages.headers[i].size()});
  }
  announced_[chunk] = start_transfer(r_, sends_, recvs_);
}

void DifferenceGather::encode(std::int64_t chunk, Messages& messages) {
  const ConstTensorView values = shard_.slice(plan_.chunk(chunk).begin, plan_.chunk(chunk).count);
  const TensorView base = node_gather_.kept(plan_.rank(), chunk);
  std::uint64_t& own_hash = hash(plan_.rank(), chunk);
  DifferenceHeader header;
  const Timed timed(r_.stats.codec_time);
  if (base_ == 0 || holders().empty()) {
    const Decode copy{{values.data, {}, values.dtype}, base};
    r_.codec.decode({&copy, 1}, r_.stream);
    header.body_bytes = base.num_bytes();
    header.result_hash = codec_.hash(base);
    messages.body = base.data;
  } else {
    std::byte* const body = sent_.data(0, chunk);
    const DifferenceCodec::Encoded encoded = codec_.encode(values, base, body);
    header = {DifferenceHeader::Kind::difference, encoded.num_bytes, base_, own_hash, encoded.hash};
    messages.body = body;
  }
  own_hash = header.result_hash;
  messages.body_bytes = header.body_bytes;
  write_header(header, messages.header.data());
  sent_bytes_ += kDifferenceHeaderBytes + header.body_bytes;
}

void DifferenceGather::exchange(std::int64_t chunk) {
  finish_transfer(r_, announced_[chunk]);
  Messages& messages = messages_[chunk];
  sends_.clear();
  recvs_.clear();
  for (const Move& move : holders()) sends_.push_back({move.peer, messages.body, messages.body_bytes});
  for (std::size_t i = 0; i < owners().size(); ++i) {
    const Move& move = owners()[i];
    const DifferenceHeader header = checked(messages.headers[i], move.slot, chunk);
    messages.received_headers[i] = header;
    recvs_.push_back({move.peer, room(i, chunk), header.body_bytes});
  }
  exchanged_[chunk] = start_transfer(r_, sends_, recvs_);
}

DifferenceHeader DifferenceGather::checked(const Header& wire, int slot, std::int64_t chunk) {
  const DifferenceHeader header = checked_header(wire.data(), slot, base_, node_gather_.kept(slot, chunk));
  if (base_ > 0 && header.base_hash != hash(slot, chunk)) throw TransportError(other_base(slot, base_));
  return header;
}

void DifferenceGather::decode_and_hand_on(std::int64_t chunk) {
  finish_transfer(r_, exchanged_[chunk]);
  {
    const Timed timed(r_.stats.codec_time);
    for (std::size_t i = 0; i < owners().size(); ++i) {
      update(owners()[i].slot, chunk, messages_[chunk].received_headers[i], room(i, chunk));
    }
  }
  node_gather_.start(chunk);
}

void DifferenceGather::update(int slot, std::int64_t chunk, const DifferenceHeader& header, const std::byte* body) {
  const TensorView values = node_gather_.kept(slot, chunk);
  std::uint64_t result = 0;
  try {
    result = base_ > 0 ? codec_.decode({body, header.body_bytes}, values) : codec_.hash(values);
  } catch (const Error& error) {
    throw TransportError(other_result(slot, base_, error.what()));
  }
  if (result != header.result_hash) throw TransportError(other_result(slot, base_, kStrayWrite));
  hash(slot, chunk) = result;
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
