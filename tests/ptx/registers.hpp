// Registers of a warp, and a record of the lanes in which they are undefined.
#pragma once

#include <algorithm>

#include "module.hpp"

namespace ptx {

class Registers {
 public:
  explicit Registers(const Kernel& kernel)
      : kernel_(kernel),
        predicates_(static_cast<std::size_t>(kernel.num_predicates)),
        words_(static_cast<std::size_t>(kernel.num_words) * kLanes),
        longs_(static_cast<std::size_t>(kernel.num_longs) * kLanes),
        undefined_predicates_(predicates_.size()),
        undefined_words_(words_.size() / kLanes),
        undefined_longs_(longs_.size() / kLanes) {}

  // Starts a CTA: all registers but the constants and the special ones become undefined.
  void begin(u32 first_thread, u32 cta, u32 cta_threads, u32 num_ctas, u64 parameter) {
    for (auto* undefined : {&undefined_predicates_, &undefined_words_, &undefined_longs_}) {
      std::fill(undefined->begin(), undefined->end(), ~0u);
    }
    for (const Constant& constant : kernel_.constants) fill(constant.where, constant.value);
    fill({Kind::bits32, kCta}, cta);
    fill({Kind::bits32, kCtaThreads}, cta_threads);
    fill({Kind::bits32, kNumCtas}, num_ctas);
    fill(kParameter, parameter);
    for (const Special special : {kThread, kLane}) {
      fill({Kind::bits32, special}, 0);
      u32* lanes = words({Kind::bits32, special});
      for (u32 l = 0; l < kLanes; ++l) lanes[l] = l + (special == kThread ? first_thread : 0);
    }
  }

  u32& predicate(Operand operand) { return predicates_[static_cast<std::size_t>(operand.index)]; }
  u32* words(Operand operand) { return words_.data() + static_cast<std::size_t>(operand.index) * kLanes; }
  u64* longs(Operand operand) { return longs_.data() + static_cast<std::size_t>(operand.index) * kLanes; }

  // A bit for each lane.
  u32& undefined(Operand operand) {
    const auto index = static_cast<std::size_t>(operand.index);
    if (operand.kind == Kind::predicate) return undefined_predicates_[index];
    return operand.kind == Kind::bits64 ? undefined_longs_[index] : undefined_words_[index];
  }
  u32 undefined_sources(const Instruction& instruction) {
    u32 all = 0;
    for (u32 i = 0; i < instruction.num_sources; ++i) all |= undefined(instruction.sources[i]);
    return all;
  }
  void set_undefined(Operand operand, u32 which, u32 active) {
    u32& state = undefined(operand);
    state = (state & ~active) | (which & active);
  }
  void set_predicate(Operand operand, u32 value, u32 which_undefined, u32 active) {
    u32& lanes = predicate(operand);
    lanes = (lanes & ~active) | (value & active);
    set_undefined(operand, which_undefined, active);
  }

  // Returns the value of one lane.
  u64 value(Operand operand, u32 lane) {
    return operand.kind == Kind::bits64 ? longs(operand)[lane] : words(operand)[lane];
  }
  void set_value(Operand operand, u32 lane, u64 value) {
    if (operand.kind == Kind::bits64) {
      longs(operand)[lane] = value;
    } else {
      words(operand)[lane] = static_cast<u32>(value);
    }
  }

 private:
  void fill(Operand operand, u64 value) {
    if (operand.kind == Kind::predicate) {
      predicate(operand) = value != 0 ? ~0u : 0;
    } else {
      for (u32 l = 0; l < kLanes; ++l) set_value(operand, l, value);
    }
    undefined(operand) = 0;
  }

  const Kernel& kernel_;
  std::vector<u32> predicates_;
  std::vector<u32> words_;
  std::vector<u64> longs_;
  std::vector<u32> undefined_predicates_, undefined_words_, undefined_longs_;
};

}  // namespace ptx
