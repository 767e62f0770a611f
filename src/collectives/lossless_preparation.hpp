// What lossless gathers keep, and their preparations.
//
// NCCL needs the length of a message on both hosts. So differences are encoded ahead of their gathers, and the headers
// of many are exchanged together. This blocks the host once for all. Other transports take a limit, and need no
// preparation.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/call.hpp"
#include "zcomm/error.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {

// Hashes, and status words in which jobs set bits of LosslessError.
class SecondaryHashes {
 public:
  SecondaryHashes(const LosslessCodec& codec, std::shared_ptr<const LosslessPlan> plan)
      : plan_(std::move(plan)),
        memory_(codec.make_memory(count() * sizeof(std::uint64_t), count() * sizeof(std::uint32_t))) {}

  // Returns those of a chunk of a slot that this rank holds.
  std::uint64_t* hash(int slot, std::int64_t chunk) const {
    return reinterpret_cast<std::uint64_t*>(memory_->data()) + plan_->place(slot) * plan_->num_chunks() + chunk;
  }
  std::uint32_t* status(int slot, std::int64_t chunk) const {
    return reinterpret_cast<std::uint32_t*>(memory_->shared()) + plan_->place(slot) * plan_->num_chunks() + chunk;
  }

  // Orders calls on different streams: each begins with make_wait() and ends with mark_use().
  void make_wait(StreamView stream) const { memory_->make_wait(stream); }
  void mark_use(StreamView stream) { memory_->mark_use(stream); }
  // Tells whether jobs are done when their call returns, as on a CPU.
  bool are_at_once() const { return memory_->is_at_once(); }

  // Begins a gather from generation `base`: errors that are found from now on are its own, or of the values that it
  // leaves. Throws TransportError if an error was found before.
  void begin_gather(std::uint64_t base) {
    if (const auto wrong = finding(); wrong && !wrong->empty()) throw TransportError(*wrong);
    base_ = base;
  }

  // Returns and forgets an error that was found: see DeferredCheck. Before the last use is over, peers may not have the
  // NaN values yet, and nothing is known. Thread-safe.
  std::optional<std::string> finding() const {
    if (!memory_->is_over()) return std::nullopt;
    for (const int slot : plan_->held()) {
      for (std::int64_t chunk = 0; chunk < plan_->num_chunks(); ++chunk) {
        const std::uint32_t errors = std::atomic_ref(*status(slot, chunk)).exchange(0);
        if (errors != 0) return describe(errors, slot, base_);
      }
    }
    return "";
  }

 private:
  std::size_t count() const { return plan_->held().size() * static_cast<std::size_t>(plan_->num_chunks()); }
  // Describes errors in what was made of generation `base`. The owner of a slot has the slot's number.
  std::string describe(std::uint32_t errors, int slot, std::uint64_t base) const;

  const std::shared_ptr<const LosslessPlan> plan_;
  std::atomic<std::uint64_t> base_ = 0;
  const std::unique_ptr<JobMemory> memory_;
};

// Returns a chunk of a slot that this rank holds.
inline TensorView secondary_values(const LosslessPlan& plan, const SecondaryShard& secondary, int slot,
                                   std::int64_t chunk) {
  const TensorView whole{secondary.memory.data() + plan.secondary_offset(slot),
                         plan.slots().lengths[static_cast<std::size_t>(slot)], plan.slots().dtype};
  return whole.slice(plan.chunk(chunk).begin, plan.chunk(chunk).count);
}

// Reads the header of a message for `values` of `slot`. Throws TransportError unless it refers to generation `base` or,
// if that is 0, has whole values. Does not check hashes.
LosslessHeader checked_header(const std::byte* wire, int slot, std::uint64_t base, ConstTensorView values);

// Shard of a lossless gather, and the kept values that its difference refers to. SecondaryShard::hashes exists.
struct LosslessShard {
  const LosslessPlan& plan;
  ConstTensorView shard;
  SecondaryShard& secondary;

  // Makes the job that encodes a chunk and keeps it, without a message.
  EncodeLossless encoding(std::int64_t chunk, std::uint64_t base) const {
    return {.values = shard.slice(plan.chunk(chunk).begin, plan.chunk(chunk).count),
            .base = secondary_values(plan, secondary, plan.rank(), chunk),
            .generation = base,
            .hash = secondary.hashes->hash(plan.rank(), chunk)};
  }
};

// Returns the longest message. Whole values take no more than their longest difference.
inline std::size_t most_bytes(std::int64_t num_elements) {
  return kLosslessHeaderBytes + max_lossless_bytes(num_elements);
}

// Makes a copy job for Codec::decode, which makes many copies in one launch.
Decode copy_of(const std::byte* from, std::byte* to, std::size_t num_bytes);

// Messages of a prepared gather: bodies, and headers that have been exchanged. Without other nodes there are none.
struct PreparedMessages {
  std::uint64_t base;        // the generation that differences refer to; 0: whole values are sent
  StreamView stream;         // that the memory belongs to
  std::size_t first_header;  // in each row
  std::size_t row_bytes = 0;
  std::shared_ptr<const Scratch> headers = {};  // of a batch: a row of this rank, then one per owner of a held slot
  std::vector<std::size_t> sent = {};           // bytes of the body of each chunk
  std::vector<std::size_t> offsets = {};        // of the bodies in their memory, and their end
  std::unique_ptr<Scratch> bodies = {};
  std::vector<std::size_t> received = {};  // bytes of the bodies of each owner, one owner after the other

  // Makes memory for bodies of these sizes.
  void reserve(const Resources& r, const std::vector<std::size_t>& sizes);
  // Returns the header of a message of owner `number`; the second function, the bytes of its body.
  const std::byte* header(std::size_t number, std::size_t chunk) const {
    return headers->data() + (1 + number) * row_bytes + (first_header + chunk) * kLosslessHeaderBytes;
  }
  std::size_t body_bytes(std::size_t number, std::size_t chunk) const { return received[number * sent.size() + chunk]; }
};

// Gathers of one communicator that are prepared.
class Preparations {
 public:
  bool is_prepared(const SecondaryShard& secondary) const { return prepared_.contains(secondary.hashes); }

  // Encodes at least one shard, exchanges headers, and waits for them. A shard that is prepared already is prepared
  // again as whole values, because the holders' base is not the one it was encoded for. Throws TransportError if a peer
  // prepares something else.
  void prepare(const Resources& r, std::span<const LosslessShard> shards);

  // Returns the messages of a gather, which it prepares if that is not done. Null on a transport that is not
  // stream-ordered, which needs none. The second function: the gather sends them now.
  std::shared_ptr<const PreparedMessages> of(const Resources& r, const LosslessShard& shard);
  void remove(const SecondaryShard& secondary) { prepared_.erase(secondary.hashes); }

 private:
  std::map<std::weak_ptr<SecondaryHashes>, std::shared_ptr<PreparedMessages>, std::owner_less<>> prepared_;
  // Memory from which the host reads sizes, reused by all batches.
  std::unique_ptr<JobMemory> readback_;
  std::size_t readback_bytes_ = 0;
};

}  // namespace zcomm
