#include <algorithm>
#include <utility>

#include "slots.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

std::vector<Segment<BlockFormat>> whole_slot(const SlotShape& slots) {
  return {{slots.lengths.empty() ? 0 : slots.longest(), {}}};
}

}  // namespace

LosslessPlan::LosslessPlan(World world, const SlotShape& slots, GatherSegments segments)
    : world_(std::move(world)),
      segments_(segments.empty() ? whole_slot(slots) : std::vector(segments.begin(), segments.end())),
      slots_(checked<BlockFormat>(slots, world_, segments_)),
      description_(slots_.to_string() + " by differences"),
      chunks_(world_.chunk_bytes, topology().size(), whole_slot(slots_), slots_.dtype, kLosslessTile),
      inter_node_hop_(topology().holder_hop(rank())),
      intra_node_hop_(topology().secondary_hop(rank())),
      slot_bytes_(wire_bytes({}, slots_.dtype, slots_.longest())),
      places_(places_of(topology(), rank(), in_rank_order(topology()))),
      num_held_(zcomm::num_held(topology(), rank())) {
  check_argument(slots_.dtype != DType::float32, [] {
    return std::string(
        "slots: expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32");
  });
  for (std::int64_t i = 0; i < num_chunks(); ++i) longest_chunk_ = std::max(longest_chunk_, chunk(i).count);
  cut_at_segments();
}

void LosslessPlan::cut_at_segments() {
  for (std::int64_t i = 0; i < num_chunks(); ++i) {
    first_pieces_.push_back(pieces_.size());
    const std::int64_t chunk_end = chunk(i).begin + chunk(i).count;
    std::int64_t first = 0;
    for (std::size_t segment = 0; segment < segments_.size(); ++segment) {
      const std::int64_t begin = std::max(first, chunk(i).begin);
      const std::int64_t count = std::min(first + segments_[segment].num_elements, chunk_end) - begin;
      if (count > 0) pieces_.push_back({begin, count, {}, segment, begin - first});
      first += segments_[segment].num_elements;
    }
  }
  first_pieces_.push_back(pieces_.size());
}

LinkBytes LosslessPlan::bytes(std::size_t body_bytes) const {
  const std::size_t message_bytes = static_cast<std::size_t>(num_chunks()) * kLosslessHeaderBytes + body_bytes;
  LinkBytes total = bytes_from_secondary();
  total.inter_node = inter_node_hop_.sends.size() * message_bytes;
  return total;
}

LinkBytes LosslessPlan::bytes_from_secondary() const {
  LinkBytes total;
  for (const Move& move : intra_node_hop_.sends) {
    const std::int64_t length = slots_.lengths[static_cast<std::size_t>(move.slot)];
    total.intra_node += static_cast<std::size_t>(length) * element_size(slots_.dtype);
  }
  return total;
}

std::size_t LosslessPlan::largest_kept_bytes() const {
  return static_cast<std::size_t>(most_held(topology())) * slot_bytes_;
}

}  // namespace zcomm
