// The codec jobs that add the residual of error feedback to a reduce_scatter's sums, and bring it up to date.
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
  // Without feedback nothing is covered.
  Residuals(const ReducePlan& plan, const Feedback* feedback) : plan_(plan), feedback_(feedback) {}

  bool covers(int owner, BlockFormat format) const { return plan_.has_residual(owner, format); }
  // Adds to `jobs` the encoding of terms.sum(), piece `index` of a chunk of the slot of `owner`, which is covered; and
  // to that sum the residual.
  void encode(int owner, std::int64_t chunk, std::size_t index, TermList& terms, DecodeSumEncode job,
              std::vector<DecodeSumEncode>& jobs);

  // What remains of the jobs since begin_chunk, once these are done: what the sums had and their wires have not.
  void begin_chunk() { updates_.clear(); }
  std::span<const DecodeSumEncode> updates() const { return updates_; }

 private:
  const ReducePlan& plan_;
  const Feedback* feedback_;
  std::vector<DecodeSumEncode> updates_;
};

}  // namespace zcomm
