// Where the residual of a reduce_scatter has each piece, and the codec jobs that keep it up.
#pragma once

#include <vector>

#include "chunks.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/feedback.hpp"

namespace zcomm {

// The owners of the slots whose encoding `rank` keeps a residual of.
std::vector<int> residual_owners(const Topology& topology, int rank);

class Residuals {
 public:
  // Without feedback nothing is covered.
  Residuals(const Topology& topology, int rank, std::span<const ConstTensorView> slots,
            const Chunks<HopFormats>& chunks, const Feedback* feedback);

  std::size_t num_bytes() const { return num_bytes_; }

  // Elements that pieces must be a multiple of, so that no block of the residual straddles two.
  static int granule(const Feedback* feedback) {
    return feedback == nullptr ? 1 : std::max(feedback->format.block_size, 1);
  }

  bool covers(int owner, BlockFormat format) const {
    return first_of_[static_cast<std::size_t>(owner)] >= 0 && format.kind != ElementKind::exact;
  }
  // Adds to `jobs` the encoding of the sum of terms[first_term, ...), piece `index` of a chunk of the slot of `owner`,
  // which is covered. There must be room for kExtraTerms more: jobs hold spans of `terms`.
  static constexpr std::size_t kExtraTerms = 2;
  void encode(int owner, std::int64_t chunk, std::size_t index, std::vector<Wire>& terms, std::size_t first_term,
              DecodeSumEncode job, std::vector<DecodeSumEncode>& jobs);

  // What remains of the jobs since begin_chunk, once these are done: what the sums had and their wires have not.
  void begin_chunk() { updates_.clear(); }
  std::span<const DecodeSumEncode> updates() const { return updates_; }

 private:
  const Feedback* feedback_;
  std::size_t num_bytes_ = 0;
  std::vector<std::ptrdiff_t> first_of_;  // of each owner, in offsets_; -1: not covered
  std::vector<std::size_t> first_piece_;  // of each chunk, in an owner's offsets
  std::vector<std::size_t> offsets_;
  std::vector<DecodeSumEncode> updates_;
};

}  // namespace zcomm
