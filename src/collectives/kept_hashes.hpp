// What a lossless gather keeps of a chunk of a held slot: its values, their hash, and the errors that were found.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lossless_errors.hpp"
#include "zcomm/collectives.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// Hashes, and status words in which jobs set bits of LosslessError.
class KeptHashes {
 public:
  KeptHashes(const LosslessCodec& codec, const LosslessPlan& plan)
      : rank_(plan.rank()),
        num_chunks_(static_cast<std::size_t>(plan.num_chunks())),
        slots_(plan.held()),
        memory_(codec.make_memory(count() * sizeof(std::uint64_t), count() * sizeof(std::uint32_t))) {}

  // Numbers follow LosslessPlan::place(), then chunks.
  std::uint64_t* hash(std::size_t number) const { return reinterpret_cast<std::uint64_t*>(memory_->data()) + number; }
  std::uint32_t* status(std::size_t number) const {
    return reinterpret_cast<std::uint32_t*>(memory_->shared()) + number;
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
    for (std::size_t i = 0; i < count(); ++i) {
      const std::uint32_t errors = std::atomic_ref(*status(i)).exchange(0);
      if (errors != 0) return describe(errors, slots_[i / num_chunks_], base_);
    }
    return "";
  }

 private:
  std::size_t count() const { return slots_.size() * num_chunks_; }
  std::string describe(std::uint32_t errors, int slot, std::uint64_t base) const {
    if (errors == kKeptError) return written_to(slot, base + 1, rank_);
    if ((errors & kBaseError) != 0) return other_base(slot, base);
    if ((errors & (kHeaderError | kGenerationError)) != 0) return other_result(slot, base, "another message arrived");
    return other_result(slot, base, (errors & kBodyError) != 0 ? kOtherBody : kStrayWrite);
  }

  const int rank_;
  const std::size_t num_chunks_;
  const std::vector<int> slots_;  // held slots
  std::atomic<std::uint64_t> base_ = 0;
  const std::unique_ptr<JobMemory> memory_;
};

struct KeptChunk {
  TensorView values;
  std::uint64_t* hash;
  std::uint32_t* status;
};

// Returns a chunk of a slot that this rank holds; Kept::hashes exists.
inline KeptChunk kept_chunk(const LosslessPlan& plan, const Kept& kept, int slot, std::int64_t chunk) {
  const TensorView whole{kept.memory.data() + plan.kept_offset(slot),
                         plan.slots().lengths[static_cast<std::size_t>(slot)], plan.slots().dtype};
  const auto number = static_cast<std::size_t>(plan.place(slot) * plan.num_chunks() + chunk);
  return {whole.slice(plan.chunk(chunk).begin, plan.chunk(chunk).count), kept.hashes->hash(number),
          kept.hashes->status(number)};
}

}  // namespace zcomm
