// Codec jobs that add the residual of error feedback to a reduce_scatter's sums, and update it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "message.hpp"
#include "zcomm/feedback.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

class Residuals {
 public:
  // Covers nothing without feedback.
  Residuals(const ReducePlan& plan, const Feedback* feedback) : plan_(plan), feedback_(feedback) {}

  bool covers(int owner, BlockFormat format) const { return plan_.has_residual(owner, format); }
  // Adds the residual to terms.sum(), piece `index` of a chunk of `owner`'s slot, and adds the encoding of that sum to
  // `jobs`. The piece must be covered.
  void encode(int owner, std::int64_t chunk, std::size_t index, TermList& terms, DecodeSumEncode job,
              std::vector<DecodeSumEncode>& jobs);

  // Lists the jobs that update residuals after the jobs since begin_chunk: each sum minus its wire.
  void begin_chunk() { updates_.clear(); }
  std::span<const DecodeSumEncode> updates() const { return updates_; }

 private:
  const ReducePlan& plan_;
  const Feedback* feedback_;
  std::vector<DecodeSumEncode> updates_;
};

}  // namespace zcomm
