#include "residuals.hpp"

namespace zcomm {

void Residuals::encode(int owner, std::int64_t chunk, std::size_t index, TermList& terms, DecodeSumEncode job,
                       std::vector<DecodeSumEncode>& jobs) {
  std::byte* const residual = feedback_->residual + plan_.residual_offset(owner, chunk, index);
  if (!feedback_->empty) {
    // Counts NaN as 0, so that a block that overflowed recovers.
    terms.add({residual, feedback_->format, DType::float32, feedback_->decay, true});
  }
  job.wires = terms.sum();
  jobs.push_back(job);
  terms.add({job.wire, job.format, DType::float32, -1.0f});
  updates_.push_back({terms.sum(), job.num_elements, feedback_->format, residual, {}});
}

}  // namespace zcomm
