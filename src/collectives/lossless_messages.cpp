#include "lossless_messages.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "counted.hpp"
#include "host/size_class.hpp"

namespace zcomm {
namespace {

// Returns the longest message. Whole values take no more than their longest difference.
std::size_t most_bytes(std::int64_t num_elements) { return kLosslessHeaderBytes + max_lossless_bytes(num_elements); }

// Returns the offsets of pieces of these sizes, and their end.
std::vector<std::size_t> aligned_offsets(const std::vector<std::size_t>& sizes) {
  std::vector<std::size_t> offsets{0};
  for (const std::size_t size : sizes) offsets.push_back(offsets.back() + align_wire(size));
  return offsets;
}

// Makes a copy job for Codec::decode, which makes many copies in one launch.
Decode copy_of(const std::byte* from, std::byte* to, std::size_t num_bytes) {
  constexpr DType kTwoBytes = DType::bfloat16;
  return {{from, {}, kTwoBytes}, {to, static_cast<std::int64_t>(num_bytes / element_size(kTwoBytes)), kTwoBytes}};
}

// Messages that are encoded when they are listed. Their receivers have room for the longest ones.
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

// Messages whose headers have been exchanged. Without other nodes there are none.
class PreparedMessages final : public LosslessMessages {
 public:
  PreparedMessages(std::uint64_t base_generation, StreamView stream_of_memory, const Hop& hop, std::size_t number)
      : LosslessMessages(base_generation, stream_of_memory), first_header(number), hop_(hop) {}

  std::size_t longest() const override {
    std::size_t longest = 0;
    for (const std::size_t size : received) longest = std::max(longest, align_wire(size));
    return kLosslessHeaderBytes + longest;
  }

  void list(const Resources& r, std::int64_t chunk, const MessageBuffers& buffers, std::vector<Send>& sends,
            std::vector<Recv>& recvs) override {
    if (hop_.sends.empty()) return;
    const auto number = static_cast<std::size_t>(chunk);
    sent_bytes += kLosslessHeaderBytes + sent[number];
    for (const Move& move : hop_.sends) sends.push_back({move.peer, bodies->data() + offsets[number], sent[number]});
    copies_.clear();
    for (std::size_t i = 0; i < hop_.recvs.size(); ++i) {
      std::byte* const message = buffers.data(static_cast<int>(i), chunk);
      const std::byte* const header = headers->data() + (1 + i) * row_bytes + number * kLosslessHeaderBytes;
      copies_.push_back(copy_of(header + first_header * kLosslessHeaderBytes, message, kLosslessHeaderBytes));
      const std::size_t num_bytes = received_bytes(i, chunk, message) - kLosslessHeaderBytes;
      recvs.push_back({hop_.recvs[i].peer, message + kLosslessHeaderBytes, num_bytes});
    }
    run_codec(r, copies_);
  }

  std::size_t received_bytes(std::size_t owner, std::int64_t chunk, const std::byte*) const override {
    return kLosslessHeaderBytes + received[owner * sent.size() + static_cast<std::size_t>(chunk)];
  }

  const std::size_t first_header;  // in each row
  std::size_t row_bytes = 0;
  std::shared_ptr<const Scratch> headers = {};  // of a batch: a row of this rank, then one per owner of a held slot
  std::vector<std::size_t> sent = {};           // bytes of the body of each chunk
  std::vector<std::size_t> offsets = {};        // of the bodies
  std::vector<std::size_t> received = {};       // bytes of the bodies of each owner, one owner after the other
  std::unique_ptr<Scratch> bodies = {};

 private:
  const Hop hop_;
  std::vector<Decode> copies_;
};

class Preparation {
 public:
  Preparation(const Resources& r, std::span<const LosslessShard> shards, Readback& readback)
      : r_(r), hop_(shards.front().plan.inter_node_hop()), readback_(readback) {
    for (const LosslessShard& shard : shards) add(shard);
  }

  // Returns the messages of each shard.
  std::vector<std::unique_ptr<LosslessMessages>> run() {
    encode();
    if (moves_bytes()) {
      exchange_headers();
      for (Item& item : items_) read_headers(item);
      pack();
    }
    std::vector<std::unique_ptr<LosslessMessages>> all;
    for (Item& item : items_) {
      item.shard.kept.hashes->mark_use(r_.stream);
      item.shard.kept.generation = item.prepared->base;
      all.push_back(std::move(item.prepared));
    }
    return all;
  }

 private:
  struct Item {
    const LosslessShard& shard;
    std::unique_ptr<PreparedMessages> prepared;
    std::vector<std::size_t> offsets;   // of the messages
    std::unique_ptr<Scratch> messages;  // with room for the longest ones
  };

  bool moves_bytes() const { return !hop_.sends.empty() && num_headers_ > 0; }
  // Layout of the memory that the host reads: sizes of own messages, then one row of headers per owner.
  std::uint64_t* sizes() const { return reinterpret_cast<std::uint64_t*>(readback_.memory->shared()); }
  std::size_t row_bytes() const { return num_headers_ * kLosslessHeaderBytes; }
  std::size_t num_row_bytes() const { return hop_.recvs.size() * row_bytes(); }
  std::byte* rows() const { return readback_.memory->shared() + num_headers_ * sizeof(std::uint64_t); }

  void add(const LosslessShard& shard) {
    std::vector<std::size_t> longest;
    longest.reserve(static_cast<std::size_t>(shard.plan.num_chunks()));
    for (std::int64_t chunk = 0; chunk < shard.plan.num_chunks(); ++chunk) {
      longest.push_back(most_bytes(shard.values(chunk).num_elements));
    }
    auto prepared = std::make_unique<PreparedMessages>(shard.kept.generation, r_.stream, hop_, num_headers_);
    items_.push_back({shard, std::move(prepared), aligned_offsets(longest), nullptr});
    num_headers_ += longest.size();
  }

  void reserve_readback() {
    const std::size_t num_bytes = num_headers_ * sizeof(std::uint64_t) + num_row_bytes();
    if (num_bytes <= readback_.num_bytes) return;
    readback_.num_bytes = size_class(num_bytes);
    readback_.memory = r_.codec.lossless()->make_memory(0, readback_.num_bytes);
  }

  void encode() {
    if (moves_bytes()) reserve_readback();
    std::vector<EncodeLossless> jobs;
    for (Item& item : items_) {
      item.shard.kept.generation = 0;  // until all are prepared
      item.shard.kept.hashes->make_wait(r_.stream);
      if (moves_bytes()) {
        item.messages = std::make_unique<Scratch>(r_.workspace, item.offsets.back(), r_.stream);
      }
      for (std::size_t chunk = 0; chunk + 1 < item.offsets.size(); ++chunk) {
        EncodeLossless& job =
            jobs.emplace_back(item.shard.encoding(static_cast<std::int64_t>(chunk), item.prepared->base));
        if (item.messages == nullptr) continue;
        job.message = item.messages->data() + item.offsets[chunk];
        job.num_bytes = sizes() + item.prepared->first_header + chunk;
      }
    }
    run_codec(r_, jobs);
  }

  void exchange_headers() {
    headers_ = std::make_shared<Scratch>(r_.workspace, row_bytes() + num_row_bytes(), r_.stream);
    std::vector<Decode> copies;
    for (const Item& item : items_) {
      for (std::size_t chunk = 0; chunk + 1 < item.offsets.size(); ++chunk) {
        copies.push_back(copy_of(item.messages->data() + item.offsets[chunk],
                                 headers_->data() + copies.size() * kLosslessHeaderBytes, kLosslessHeaderBytes));
      }
    }
    run_codec(r_, copies);
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    sends.reserve(hop_.sends.size());
    recvs.reserve(hop_.recvs.size());
    for (const Move& move : hop_.sends) {
      sends.push_back({move.peer, headers_->data(), row_bytes()});
      count_sent(r_, move.peer, row_bytes());
    }
    std::byte* row = headers_->data();
    for (const Move& move : hop_.recvs) recvs.push_back({move.peer, row += row_bytes(), row_bytes()});
    const Timed timed(r_.stats.transfer_time, begin_range(r_, "zcomm::start_transfer"));
    r_.transport.start(sends, recvs, r_.stream)->wait(r_.stream);
    const Decode arrived = copy_of(headers_->data() + row_bytes(), rows(), num_row_bytes());
    r_.codec.decode({&arrived, 1}, r_.stream);
    readback_.memory->mark_use(r_.stream);
    readback_.memory->wait();
    ++r_.stats.host_waits;
    r_.transport.check();  // throws if the transfer failed, or a peer prepares something else
  }

  void read_headers(Item& item) {
    const auto& [plan, shard, kept] = item.shard;
    PreparedMessages& prepared = *item.prepared;
    const std::uint64_t* const own = sizes() + prepared.first_header;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
      prepared.sent.push_back(own[chunk] - kLosslessHeaderBytes);
    }
    for (std::size_t i = 0; i < hop_.recvs.size(); ++i) {
      const int slot = hop_.recvs[i].slot;
      const std::byte* wire = rows() + i * row_bytes() + prepared.first_header * kLosslessHeaderBytes;
      for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk, wire += kLosslessHeaderBytes) {
        const TensorView values = kept_chunk(plan, kept, slot, chunk).values;
        prepared.received.push_back(checked_header(wire, slot, prepared.base, values).body_bytes);
      }
    }
    prepared.row_bytes = row_bytes();
    prepared.headers = headers_;
  }

  // Copies the bodies out of the messages, whose buffers have room for longer ones.
  void pack() {
    std::vector<Decode> copies;
    for (Item& item : items_) {
      PreparedMessages& prepared = *item.prepared;
      prepared.offsets = aligned_offsets(prepared.sent);
      prepared.bodies = std::make_unique<Scratch>(r_.workspace, prepared.offsets.back(), r_.stream);
      for (std::size_t chunk = 0; chunk < prepared.sent.size(); ++chunk) {
        const std::byte* const body = item.messages->data() + item.offsets[chunk] + kLosslessHeaderBytes;
        copies.push_back(copy_of(body, prepared.bodies->data() + prepared.offsets[chunk], prepared.sent[chunk]));
      }
    }
    run_codec(r_, copies);
    for (Item& item : items_) item.messages.reset();
  }

  const Resources& r_;
  const Hop& hop_;  // the same for all plans of a communicator
  Readback& readback_;
  std::vector<Item> items_;
  std::size_t num_headers_ = 0;
  std::shared_ptr<const Scratch> headers_;
};

}  // namespace

std::unique_ptr<LosslessMessages> Preparations::take(const Kept& kept) {
  auto taken = prepared_.extract(kept.hashes);
  return taken.empty() ? nullptr : std::move(taken.mapped());
}

void Preparations::prepare(const Resources& r, std::span<const LosslessShard> shards) {
  std::erase_if(prepared_, [](const auto& prepared) { return prepared.first.expired(); });
  for (const LosslessShard& shard : shards) {
    shard.make_hashes(r);
    if (take(shard.kept) != nullptr) shard.kept.generation = 0;
  }
  auto messages = Preparation(r, shards, readback_).run();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    prepared_.emplace(shards[i].kept.hashes, std::move(messages[i]));
  }
}

std::unique_ptr<LosslessMessages> Preparations::messages(const Resources& r, const LosslessShard& shard) {
  shard.make_hashes(r);
  if (!are_needed_) return std::make_unique<Messages>(r, shard);
  if (!is_prepared(shard.kept)) prepare(r, {&shard, 1});
  return take(shard.kept);
}

}  // namespace zcomm
