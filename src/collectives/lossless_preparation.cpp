#include "lossless_preparation.hpp"

#include "host/size_class.hpp"
#include "stages.hpp"

namespace zcomm {
namespace {

template <class... Parts>
std::string in_slot(int slot, const Parts&... what) {
  return concat("differences of slot ", slot, ": ", what...);
}

// One batch.
class Preparation {
 public:
  Preparation(const Resources& r, std::span<const LosslessShard> shards)
      : r_(r), shards_(shards), hop_(shards.front().plan.inter_node_hop()) {
    for (const LosslessShard& shard : shards) {
      prepared_.push_back(
          std::make_unique<PreparedMessages>(PreparedMessages{shard.secondary.generation, r.stream, num_headers_}));
      num_headers_ += static_cast<std::size_t>(shard.plan.num_chunks());
    }
  }

  // Returns the bytes of the memory that the host reads: sizes of own messages, then one row of headers per owner.
  std::size_t readback_bytes() const {
    return moves_bytes() ? num_headers_ * sizeof(std::uint64_t) + num_row_bytes() : 0;
  }

  // Returns the messages of each shard.
  std::vector<std::unique_ptr<PreparedMessages>> run(JobMemory* readback) {
    readback_ = readback;
    encode();
    if (moves_bytes()) {
      exchange_headers();
      for (std::size_t i = 0; i < shards_.size(); ++i) read_headers(shards_[i], *prepared_[i]);
      pack();
    }
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      shards_[i].secondary.hashes->mark_use(r_.stream);
      shards_[i].secondary.generation = prepared_[i]->base;
    }
    return std::move(prepared_);
  }

 private:
  bool moves_bytes() const { return !hop_.sends.empty() && num_headers_ > 0; }
  std::uint64_t* sizes() const { return reinterpret_cast<std::uint64_t*>(readback_->shared()); }
  std::size_t row_bytes() const { return num_headers_ * kLosslessHeaderBytes; }
  std::size_t num_row_bytes() const { return hop_.recvs.size() * row_bytes(); }
  std::byte* rows() const { return readback_->shared() + num_headers_ * sizeof(std::uint64_t); }

  // Encodes messages, with room for the longest ones.
  void encode() {
    std::vector<EncodeLossless> jobs;
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      const LosslessShard& shard = shards_[i];
      PreparedMessages& prepared = *prepared_[i];
      shard.secondary.generation = 0;  // until all are prepared
      shard.secondary.hashes->make_wait(r_.stream);
      std::vector<std::size_t> longest;
      for (std::int64_t chunk = 0; chunk < shard.plan.num_chunks(); ++chunk) {
        const EncodeLossless& job = jobs.emplace_back(shard.encoding(chunk, prepared.base));
        longest.push_back(most_bytes(job.values.num_elements));
      }
      if (!moves_bytes()) continue;
      prepared.reserve(r_, longest);
      EncodeLossless* const own = jobs.data() + (jobs.size() - longest.size());
      for (std::size_t chunk = 0; chunk < longest.size(); ++chunk) {
        own[chunk].message = prepared.bodies->data() + prepared.offsets[chunk];
        own[chunk].num_bytes = sizes() + prepared.first_header + chunk;
      }
    }
    run_codec(r_, jobs);
  }

  void exchange_headers() {
    headers_ = std::make_shared<Scratch>(r_.workspace, row_bytes() + num_row_bytes(), r_.stream);
    std::vector<Decode> copies;
    for (const auto& prepared : prepared_) {
      for (std::size_t chunk = 0; chunk + 1 < prepared->offsets.size(); ++chunk) {
        copies.push_back(copy_of(prepared->bodies->data() + prepared->offsets[chunk],
                                 headers_->data() + copies.size() * kLosslessHeaderBytes, kLosslessHeaderBytes));
      }
    }
    run_codec(r_, copies);
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    sends.reserve(hop_.sends.size());
    recvs.reserve(hop_.recvs.size());
    for (const Move& move : hop_.sends) sends.push_back({move.peer, headers_->data(), row_bytes()});
    std::byte* row = headers_->data();
    for (const Move& move : hop_.recvs) recvs.push_back({move.peer, row += row_bytes(), row_bytes()});
    wait_for_transfer(r_, *start_transfer(r_, sends, recvs));
    const Decode arrived = copy_of(headers_->data() + row_bytes(), rows(), num_row_bytes());
    run_codec(r_, {&arrived, 1});
    timed(r_, r_.stats.transfer_time, "zcomm::wait_for_transfer", [this] {
      readback_->mark_use(r_.stream);
      readback_->wait();
    });
    ++r_.stats.host_waits;
    r_.transport.check();  // throws if the transfer failed, or a peer prepares something else
  }

  void read_headers(const LosslessShard& shard, PreparedMessages& prepared) const {
    const auto num_chunks = static_cast<std::size_t>(shard.plan.num_chunks());
    for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
      prepared.sent.push_back(sizes()[prepared.first_header + chunk] - kLosslessHeaderBytes);
    }
    for (std::size_t i = 0; i < hop_.recvs.size(); ++i) {
      const int slot = hop_.recvs[i].slot;
      const std::byte* wire = rows() + i * row_bytes() + prepared.first_header * kLosslessHeaderBytes;
      for (std::size_t chunk = 0; chunk < num_chunks; ++chunk, wire += kLosslessHeaderBytes) {
        const TensorView values = secondary_values(shard.plan, shard.secondary, slot, static_cast<std::int64_t>(chunk));
        prepared.received.push_back(checked_header(wire, slot, prepared.base, values).body_bytes);
      }
    }
    prepared.row_bytes = row_bytes();
    prepared.headers = headers_;
  }

  // Copies the bodies out of the messages, whose buffers have room for longer ones.
  void pack() {
    std::vector<std::unique_ptr<Scratch>> messages;
    std::vector<Decode> copies;
    for (const auto& prepared : prepared_) {
      const std::byte* const all = messages.emplace_back(std::move(prepared->bodies))->data();
      const std::vector<std::size_t> offsets = std::move(prepared->offsets);
      prepared->reserve(r_, prepared->sent);
      for (std::size_t chunk = 0; chunk < prepared->sent.size(); ++chunk) {
        copies.push_back(copy_of(all + offsets[chunk] + kLosslessHeaderBytes,
                                 prepared->bodies->data() + prepared->offsets[chunk], prepared->sent[chunk]));
      }
    }
    run_codec(r_, copies);
  }

  const Resources& r_;
  const std::span<const LosslessShard> shards_;
  const Hop& hop_;  // the same for all plans of a communicator
  std::vector<std::unique_ptr<PreparedMessages>> prepared_;
  std::size_t num_headers_ = 0;
  JobMemory* readback_ = nullptr;
  std::shared_ptr<const Scratch> headers_;
};

}  // namespace

std::string SecondaryHashes::describe(std::uint32_t errors, int slot, std::uint64_t base) const {
  const std::string old = concat("generation ", base);
  const std::string made = concat("generation ", base + 1);
  if (errors == kSecondaryError) {
    return in_slot(slot, made, " was written to on rank ", plan_->rank(),
                   " since it was gathered: something has written into what it keeps, or its weights have "
                   "changed in a way that PyTorch does not count");
  }
  if ((errors & kBaseError) != 0) return in_slot(slot, old, " of this rank and of rank ", slot, " are not the same");
  const char* why = "something has written into what one of the two keeps";
  if ((errors & kBodyError) != 0) why = "difference: expected what an encoder wrote, got other bytes";
  if ((errors & (kHeaderError | kGenerationError)) != 0) why = "another message arrived";
  return in_slot(slot, "what this rank has made of ", old, " is not ", made, " of rank ", slot, ": ", why);
}

LosslessHeader checked_header(const std::byte* wire, int slot, std::uint64_t base, ConstTensorView values) {
  LosslessHeader header;
  try {
    header = read_header(wire);
  } catch (const Error& error) {
    throw TransportError(in_slot(slot, error.what()));
  }
  if (header.generation != base || header.is_difference != (base > 0)) {
    throw TransportError(in_slot(slot, "this rank holds generation ", base, ", rank ", slot,
                                 " sent what goes with generation ", header.generation));
  }
  const std::size_t most = base > 0 ? max_lossless_bytes(values.num_elements) : values.num_bytes();
  if (header.body_bytes > most || (base == 0 && header.body_bytes != most)) {
    throw TransportError(in_slot(slot, "rank ", slot, " announced ", header.body_bytes, " bytes, expected ",
                                 base > 0 ? "at most " : "", most));
  }
  return header;
}

Decode copy_of(const std::byte* from, std::byte* to, std::size_t num_bytes) {
  constexpr DType kTwoBytes = DType::bfloat16;
  return {{from, {}, kTwoBytes}, {to, static_cast<std::int64_t>(num_bytes / element_size(kTwoBytes)), kTwoBytes}};
}

void PreparedMessages::reserve(const Resources& r, const std::vector<std::size_t>& sizes) {
  offsets = {0};
  for (const std::size_t size : sizes) offsets.push_back(offsets.back() + align_wire(size));
  bodies = std::make_unique<Scratch>(r.workspace, offsets.back(), r.stream);
}

void Preparations::prepare(const Resources& r, std::span<const LosslessShard> shards) {
  std::erase_if(prepared_, [](const auto& prepared) { return prepared.first.expired(); });
  for (const LosslessShard& shard : shards) {
    if (prepared_.erase(shard.secondary.hashes) > 0) shard.secondary.generation = 0;
  }
  Preparation preparation(r, shards);
  if (const std::size_t num_bytes = preparation.readback_bytes(); num_bytes > readback_bytes_) {
    readback_bytes_ = size_class(num_bytes);
    readback_ = r.codec.lossless()->make_memory(0, readback_bytes_);
  }
  auto messages = preparation.run(readback_.get());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    prepared_.emplace(shards[i].secondary.hashes, std::move(messages[i]));
  }
}

std::shared_ptr<const PreparedMessages> Preparations::of(const Resources& r, const LosslessShard& shard) {
  if (!r.transport.is_stream_ordered()) return nullptr;
  if (!is_prepared(shard.secondary)) prepare(r, {&shard, 1});
  return prepared_.at(shard.secondary.hashes);
}

}  // namespace zcomm
