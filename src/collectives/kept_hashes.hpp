// What a lossless gather keeps of a chunk of a held slot: its values, their hash, and the errors that were found.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "zcomm/collectives.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

inline std::string in_slot(int slot, const std::string& what) {
  return "differences of slot " + std::to_string(slot) + ": " + what;
}

// Hashes, and status words in which jobs set bits of LosslessError.
class KeptHashes {
 public:
  KeptHashes(const LosslessCodec& codec, std::shared_ptr<const LosslessPlan> plan)
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

  // Returns and forgets an error that was found: see Finding. Before the last use is over, peers may not have the NaN
  // values yet, and nothing is known. Thread-safe.
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
  std::string describe(std::uint32_t errors, int slot, std::uint64_t base) const {
    const std::string old = "generation " + std::to_string(base);
    const std::string made = "generation " + std::to_string(base + 1);
    const std::string owner = "rank " + std::to_string(slot);
    if (errors == kKeptError) {
      return in_slot(slot, made + " was written to on rank " + std::to_string(plan_->rank()) +
                               " since it was gathered: something has written into what it keeps, or its weights have "
                               "changed in a way that PyTorch does not count");
    }
    if ((errors & kBaseError) != 0) return in_slot(slot, old + " of this rank and of " + owner + " are not the same");
    const char* why = "something has written into what one of the two keeps";
    if ((errors & kBodyError) != 0) why = "difference: expected what an encoder wrote, got other bytes";
    if ((errors & (kHeaderError | kGenerationError)) != 0) why = "another message arrived";
    return in_slot(slot, "what this rank has made of " + old + " is not " + made + " of " + owner + ": " + why);
  }

  const std::shared_ptr<const LosslessPlan> plan_;
  std::atomic<std::uint64_t> base_ = 0;
  const std::unique_ptr<JobMemory> memory_;
};

// Returns a chunk of a slot that this rank holds.
inline TensorView kept_values(const LosslessPlan& plan, const Kept& kept, int slot, std::int64_t chunk) {
  const TensorView whole{kept.memory.data() + plan.kept_offset(slot),
                         plan.slots().lengths[static_cast<std::size_t>(slot)], plan.slots().dtype};
  return whole.slice(plan.chunk(chunk).begin, plan.chunk(chunk).count);
}

// Reads the header of a message for `values` of `slot`. Throws TransportError unless it refers to generation `base` or,
// if that is 0, has whole values. Does not check hashes.
inline LosslessHeader checked_header(const std::byte* wire, int slot, std::uint64_t base, ConstTensorView values) {
  LosslessHeader header;
  try {
    header = read_header(wire);
  } catch (const Error& error) {
    throw TransportError(in_slot(slot, error.what()));
  }
  if (header.generation != base || header.is_difference != (base > 0)) {
    throw TransportError(in_slot(slot, "this rank holds generation " + std::to_string(base) + ", rank " +
                                           std::to_string(slot) + " sent what goes with generation " +
                                           std::to_string(header.generation)));
  }
  const std::size_t most = base > 0 ? max_lossless_bytes(values.num_elements) : values.num_bytes();
  if (header.body_bytes > most || (base == 0 && header.body_bytes != most)) {
    throw TransportError(in_slot(slot, "rank " + std::to_string(slot) + " announced " +
                                           std::to_string(header.body_bytes) + " bytes, expected " +
                                           (base > 0 ? "at most " : "") + std::to_string(most)));
  }
  return header;
}

}  // namespace zcomm
