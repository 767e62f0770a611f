#include "residuals.hpp"

namespace zcomm {

std::vector<int> residual_owners(const Topology& topology, int rank) {
  std::vector<int> owners;
  for (int owner = 0; owner < topology.size(); ++owner) {
    const bool covered = topology.num_nodes() == 1 ? owner != rank : !topology.same_node(owner, rank);
    const bool encoded = !topology.is_hierarchical() || topology.local_rank(owner) == topology.local_rank(rank);
    if (covered && encoded) owners.push_back(owner);
  }
  return owners;
}

Residuals::Residuals(const Topology& topology, int rank, std::span<const ConstTensorView> slots,
                     const Chunks<HopFormats>& chunks, const Feedback* feedback)
    : feedback_(feedback), first_of_(slots.size(), -1) {
  if (feedback == nullptr) return;
  std::size_t num_pieces = 0;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    first_piece_.push_back(num_pieces);
    num_pieces += chunks[chunk].size();
  }
  for (const int owner : residual_owners(topology, rank)) {
    first_of_[static_cast<std::size_t>(owner)] = static_cast<std::ptrdiff_t>(offsets_.size());
    for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
      for (const Piece<HopFormats>& piece : chunks[chunk]) {
        offsets_.push_back(num_bytes_);
        const BlockFormat format = topology.num_nodes() == 1 ? piece.format.inside : piece.format.between;
        if (format.kind == ElementKind::exact) continue;
        const ConstTensorView values = slots[static_cast<std::size_t>(owner)].slice(piece.begin, piece.count);
        num_bytes_ += wire_bytes(feedback->format, DType::float32, values.num_elements);
      }
    }
  }
}

void Residuals::encode(int owner, std::int64_t chunk, std::size_t index, std::vector<Wire>& terms,
                       std::size_t first_term, DecodeSumEncode job, std::vector<DecodeSumEncode>& jobs) {
  const auto first = static_cast<std::size_t>(first_of_[static_cast<std::size_t>(owner)]);
  std::byte* const residual =
      feedback_->residual + offsets_[first + first_piece_[static_cast<std::size_t>(chunk)] + index];
  if (!feedback_->empty) {
    terms.push_back({residual, feedback_->format, DType::float32, feedback_->decay});
    terms.back().nan_is_zero = true;  // a block that overflowed must not stay NaN for good
  }
  job.wires = std::span(terms).subspan(first_term);
  jobs.push_back(job);
  terms.push_back({job.wire, job.format, DType::float32, -1.0f});
  updates_.push_back({std::span(terms).subspan(first_term), job.num_elements, feedback_->format, residual, {}});
}

std::size_t feedback_bytes(const Topology& topology, int rank, std::size_t chunk_bytes,
                           std::span<const ConstTensorView> slots, ReduceSegments segments, BlockFormat format) {
  const Feedback feedback{nullptr, format, 1.0f, true};
  const Chunks<HopFormats> chunks(chunk_bytes, topology.size(), segments, slots[0].dtype,
                                  Residuals::granule(&feedback));
  return Residuals(topology, rank, slots, chunks, &feedback).num_bytes();
}

}  // namespace zcomm
