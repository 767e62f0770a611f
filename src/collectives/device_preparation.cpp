#include "device_preparation.hpp"

#include <cstring>
#include <utility>

#include "host/size_class.hpp"
#include "node_gather.hpp"
#include "zcomm/call_check.hpp"

namespace zcomm {
namespace {

ConstTensorView chunk_of(const ShardDifference& of, std::int64_t chunk) {
  return of.shard.slice(of.plan.chunk(chunk).begin, of.plan.chunk(chunk).count);
}

class Preparation {
 public:
  Preparation(const Resources& r, std::span<const ShardDifference> shards, const std::string& call, Readback& readback)
      : r_(r),
        hop_(shards.front().plan.inter_node_hop()),
        call_check_(call, r.world.topology.peers(r.world.rank)),
        readback_(readback) {
    for (const ShardDifference& shard : shards) add(shard);
  }

  std::list<PreparedGather> run() {
    encode();
    if (moves_bytes()) {
      exchange_headers();
      for (Item& item : items_) read_headers(item);
      pack();
    }
    std::list<PreparedGather> all;
    for (Item& item : items_) {
      item.shard.kept.device->end_use(r_.stream);
      item.shard.kept.generation = item.prepared.base;
      all.push_back(std::move(item.prepared));
    }
    return all;
  }

 private:
  struct Item {
    const ShardDifference& shard;
    PreparedGather prepared;
    std::vector<std::size_t> offsets;   // of the messages
    std::unique_ptr<Scratch> messages;  // with room for the longest ones
  };

  bool moves_bytes() const { return !hop_.sends.empty() && num_headers_ > 0; }
  // Layout of the memory that the host reads: sizes of own messages, one row of headers per owner, then calls.
  std::uint64_t* sizes() const { return reinterpret_cast<std::uint64_t*>(readback_.memory->data()); }
  std::size_t row_bytes() const { return num_headers_ * kDifferenceHeaderBytes; }
  std::size_t num_row_bytes() const { return hop_.recvs.size() * row_bytes(); }
  std::byte* rows() const { return readback_.memory->data() + num_headers_ * sizeof(std::uint64_t); }
  std::byte* words() const { return rows() + num_row_bytes(); }
  std::size_t num_words_bytes() const { return kMaxCallChars * (1 + call_check_.sends().size()); }
  void add(const ShardDifference& shard);
  void encode();
  void add_jobs(Item& item);
  void exchange_headers();
  void exchange_with_calls(std::vector<Send> sends, std::vector<Recv> recvs);
  void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) const;
  void read_headers(Item& item);
  void pack();

  const Resources& r_;
  const Hop& hop_;  // the same for all plans of a communicator
  CallCheck call_check_;
  Readback& readback_;
  std::list<Item> items_;
  std::size_t num_headers_ = 0;
  std::shared_ptr<const HeaderRows> headers_;
  std::vector<EncodeDifference> jobs_;
};

void Preparation::add(const ShardDifference& shard) {
  std::vector<std::size_t> longest;
  longest.reserve(static_cast<std::size_t>(shard.plan.num_chunks()));
  for (std::int64_t chunk = 0; chunk < shard.plan.num_chunks(); ++chunk) {
    longest.push_back(kDifferenceHeaderBytes + max_difference_bytes(chunk_of(shard, chunk).num_elements));
  }
  items_.push_back(
      {shard, {shard.kept.device, shard.kept.generation, r_.stream, num_headers_}, aligned_offsets(longest), nullptr});
  num_headers_ += longest.size();
}

void Preparation::encode() {
  const Timed timed(r_.stats.codec_time);
  if (moves_bytes()) readback_.reserve(num_headers_ * sizeof(std::uint64_t) + num_row_bytes() + num_words_bytes());
  for (Item& item : items_) {
    item.shard.kept.generation = 0;  // until all are prepared
    item.shard.kept.device->make_wait(r_.stream);
    if (moves_bytes()) {
      item.messages = std::make_unique<Scratch>(r_.workspace, item.offsets.back(), r_.stream);
    }
    add_jobs(item);
  }
  r_.codec.device_differences()->encode(jobs_, r_.stream);
}

void Preparation::add_jobs(Item& item) {
  const auto& [plan, shard, kept] = item.shard;
  const NodeGather places(r_, plan, kept, {});
  for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
    const auto number = static_cast<std::size_t>(chunk);
    EncodeDifference job{chunk_of(item.shard, chunk), places.kept(plan.rank(), chunk), item.prepared.base};
    job.hash = kept.device->hash(places.hash_number(plan.rank(), chunk));
    if (item.messages != nullptr) {
      job.message = item.messages->data() + item.offsets[number];
      job.num_bytes = sizes() + item.prepared.first_header + number;
    }
    jobs_.push_back(job);
  }
}

void Preparation::exchange_headers() {
  headers_ = std::make_shared<HeaderRows>(r_.workspace, num_headers_, 1 + hop_.recvs.size(), r_.stream);
  std::vector<Decode> copies;
  std::byte* next = headers_->row(0);
  for (const Item& item : items_) {
    for (std::size_t chunk = 0; chunk + 1 < item.offsets.size(); ++chunk, next += kDifferenceHeaderBytes) {
      copies.push_back(copy_of(item.messages->data() + item.offsets[chunk], next, kDifferenceHeaderBytes));
    }
  }
  run_codec(r_, copies);
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  sends.reserve(hop_.sends.size() + call_check_.sends().size());
  recvs.reserve(hop_.recvs.size() + call_check_.sends().size());
  for (const Move& move : hop_.sends) {
    sends.push_back({move.peer, headers_->row(0), row_bytes()});
    count_sent(r_, move.peer, row_bytes());
  }
  for (const Move& move : hop_.recvs) recvs.push_back({move.peer, headers_->row(1 + recvs.size()), row_bytes()});
  exchange_with_calls(std::move(sends), std::move(recvs));
}

// Exchanges the calls of all ranks, too, because NCCL accepts any message of the right length. Blocks the host once.
void Preparation::exchange_with_calls(std::vector<Send> sends, std::vector<Recv> recvs) {
  const Timed timed(r_.stats.transfer_time, begin_range(r_, "zcomm::start_transfer"));
  const std::vector<Recv> calls = call_check_.recvs();
  const Scratch on_device(r_.workspace, num_words_bytes(), r_.stream);
  std::memcpy(words(), call_check_.sends().front().data, kMaxCallChars);
  copy(on_device.data(), words(), kMaxCallChars);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    sends.push_back({calls[i].peer, on_device.data(), kMaxCallChars});
    recvs.push_back({calls[i].peer, on_device.data() + (1 + i) * kMaxCallChars, kMaxCallChars});
  }
  r_.transport.start(sends, recvs, r_.stream)->wait(r_.stream);
  copy(rows(), headers_->row(1), num_row_bytes());
  copy(words(), on_device.data(), num_words_bytes());
  readback_.arrived->record(r_.stream);
  readback_.arrived->wait();
  ++r_.stats.host_waits;
  r_.transport.check();  // throws if the transfer failed
  for (std::size_t i = 0; i < calls.size(); ++i) {
    std::memcpy(calls[i].data, words() + (1 + i) * kMaxCallChars, kMaxCallChars);
  }
  call_check_.verify();
}

void Preparation::copy(std::byte* to, const std::byte* from, std::size_t num_bytes) const {
  if (num_bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, as_cuda(r_.stream)), "copy sizes");
}

void Preparation::read_headers(Item& item) {
  const DifferencePlan& plan = item.shard.plan;
  PreparedGather& prepared = item.prepared;
  const NodeGather places(r_, plan, item.shard.kept, {});
  for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk) {
    prepared.sent.push_back(sizes()[prepared.first_header + static_cast<std::size_t>(chunk)] - kDifferenceHeaderBytes);
  }
  for (std::size_t i = 0; i < hop_.recvs.size(); ++i) {
    const int slot = hop_.recvs[i].slot;
    const std::byte* wire = rows() + i * row_bytes() + prepared.first_header * kDifferenceHeaderBytes;
    for (std::int64_t chunk = 0; chunk < plan.num_chunks(); ++chunk, wire += kDifferenceHeaderBytes) {
      const DifferenceHeader header = checked_header(wire, slot, prepared.base, places.kept(slot, chunk));
      prepared.received.push_back(header.body_bytes);
    }
  }
  prepared.headers = headers_;
}

// Copies the bodies out of the messages, whose buffers have room for longer ones.
void Preparation::pack() {
  std::vector<Decode> copies;
  for (Item& item : items_) {
    const std::vector<std::size_t>& sizes = item.prepared.sent;
    const std::vector<std::size_t> offsets = aligned_offsets(sizes);
    item.prepared.bodies = std::make_unique<Scratch>(r_.workspace, offsets.back(), r_.stream);
    for (std::size_t chunk = 0; chunk < sizes.size(); ++chunk) {
      const std::byte* const body = item.messages->data() + item.offsets[chunk] + kDifferenceHeaderBytes;
      copies.push_back(copy_of(body, item.prepared.bodies->data() + offsets[chunk], sizes[chunk]));
    }
  }
  run_codec(r_, copies);
  for (Item& item : items_) item.messages.reset();
}

}  // namespace

void Readback::reserve(std::size_t num_bytes) {
  if (arrived == nullptr) arrived = std::make_unique<Event>();
  if (memory == nullptr || memory->size() < num_bytes) memory = std::make_unique<PinnedBytes>(size_class(num_bytes));
}

std::list<PreparedGather> prepare_gathers(const Resources& resources, std::span<const ShardDifference> shards,
                                          const std::string& call, Readback& readback) {
  return Preparation(resources, shards, call, readback).run();
}

}  // namespace zcomm
