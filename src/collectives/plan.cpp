#include "zcomm/plan.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hash.hpp"
#include "operation_checks.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

// Returns `slots`.
template <class Format>
SlotShape checked(SlotShape slots, const World& world, std::span<const Segment<Format>> segments) {
  check(world);
  const Topology& topology = world.topology;
  check_argument(slots.lengths.size() == static_cast<std::size_t>(topology.size()), "slots: expected one for each of ",
                 topology.size(), " ranks, got ", slots.lengths.size());
  for (const std::int64_t length : slots.lengths) {
    check_argument(length >= 0, "slots: expected 0 or more elements in each, got ", length);
  }
  std::int64_t total = 0;
  for (const Segment<Format>& segment : segments) {
    check_argument(segment.num_elements >= 0, "segments: expected 0 or more elements in each, got ",
                   segment.num_elements);
    check_format(segment.format, slots.dtype);
    total += segment.num_elements;
  }
  check_argument(total == slots.longest(), "segments: expected the ", slots.longest(),
                 " elements of the longest slot, got ", total);
  return slots;
}

std::vector<int> in_rank_order(const Topology& topology) {
  std::vector<int> slots(static_cast<std::size_t>(topology.size()));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// Returns those of `slots` that `rank` holds, in the given order.
std::vector<int> held_of(const Topology& topology, int rank, std::vector<int> slots) {
  std::erase_if(slots, [&](int slot) { return topology.holder(topology.node(rank), slot) != rank; });
  return slots;
}

// Returns the most slots that any rank holds.
std::size_t most_held(const Topology& topology) {
  std::size_t most = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    // Looks at the first rank of each node: slots are dealt to a node's ranks in turn, the first one first.
    most = std::max(most, held_of(topology, topology.ranks(node).front(), in_rank_order(topology)).size());
  }
  return most;
}

// Returns the place of each rank's slot among `slots`, -1 if it is not there.
std::vector<int> places_in(const std::vector<int>& slots, const Topology& topology) {
  std::vector<int> places(static_cast<std::size_t>(topology.size()), -1);
  for (std::size_t i = 0; i < slots.size(); ++i) places[static_cast<std::size_t>(slots[i])] = static_cast<int>(i);
  return places;
}

// Returns "int8:256", or "3 segments of int8:256 and exact #1234": two of the formats, and a hash of all. Ranks compare
// it: a change breaks the protocol.
template <class Format>
std::string describe(std::span<const Segment<Format>> segments) {
  const auto format_of = [](const Segment<Format>& segment) { return segment.format.to_string(); };
  if (segments.size() == 1) return format_of(segments[0]);
  std::uint64_t hash = kFnvBasis;
  for (const Segment<Format>& segment : segments) {
    hash = fnv1a(std::to_string(segment.num_elements) + " " + format_of(segment) + ",", hash);
  }
  std::string formats;
  if (!segments.empty()) {
    formats = " of " + format_of(segments[0]);
    const auto other = std::ranges::find_if(segments, [&](const auto& s) { return s.format != segments[0].format; });
    if (other != segments.end()) formats += " and " + format_of(*other);
  }
  return std::to_string(segments.size()) + " segments" + formats + " #" + std::to_string(hash);
}

// Returns the bytes of the pieces of a slot of `length` elements, each in the format that `format_of` picks.
template <class Format, class FormatOf>
std::size_t message_bytes(std::span<const Piece<Format>> pieces, std::int64_t length, DType dtype,
                          FormatOf&& format_of) {
  std::size_t num_bytes = 0;
  for (const Piece<Format>& piece : pieces) {
    const std::int64_t count = std::clamp<std::int64_t>(length - piece.begin, 0, piece.count);
    num_bytes += wire_bytes(format_of(piece.format), dtype, count);
  }
  return num_bytes;
}

template <class FormatOf>
std::size_t largest_message(const Chunks<HopFormats>& chunks, std::int64_t length, DType dtype, FormatOf&& format_of) {
  std::size_t largest = 0;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    largest = std::max(largest, message_bytes(chunks[chunk], length, dtype, format_of));
  }
  return largest;
}

auto on(Link link) {
  return [link](const HopFormats& formats) { return formats.on(link); };
}

// Returns all slots by local rank, each time that of the own node first: what a rank forwards lies side by side.
std::vector<int> in_order_of_hops(const Topology& topology, int rank) {
  std::vector<int> slots = in_rank_order(topology);
  const auto key = [&](int slot) { return std::pair(topology.local_rank(slot), !topology.same_node(slot, rank)); };
  std::stable_sort(slots.begin(), slots.end(), [&](int a, int b) { return key(a) < key(b); });
  return slots;
}

// Returns the elements of all but the last slots of a tensor.
std::int64_t shard_of_whole_blocks(std::int64_t num_elements, int size, HopFormats formats) {
  check_argument(num_elements >= 0, "num_elements: expected at least 0, got ", num_elements);
  const std::int64_t granule = granule_of(formats);
  const std::int64_t even = (num_elements + size - 1) / size;
  return (even + granule - 1) / granule * granule;
}

std::vector<Segment<BlockFormat>> whole_slot(const SlotShape& slots) {
  return {{slots.lengths.empty() ? 0 : slots.longest(), {}}};
}

// Returns the chunks of a long call.
int parts_of(const Topology& topology, int most_hops) {
  if (most_hops == 0) return 1;
  return kPartsPerHop * (topology.is_hierarchical() ? most_hops : 1);
}

}  // namespace

std::int64_t SlotShape::longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

bool SlotShape::is_even() const {
  return std::all_of(lengths.begin(), lengths.end(), [this](std::int64_t length) { return length == lengths.front(); });
}

// Ranks compare the text: a change breaks the protocol.
std::string SlotShape::to_string() const {
  std::string text(zcomm::to_string(dtype));
  if (is_even()) return text + "[" + std::to_string(lengths.size()) + " x " + std::to_string(lengths.front()) + "]";
  text += '[';
  for (const std::int64_t length : lengths) text += std::to_string(length) + ",";
  text.back() = ']';
  return text;
}

template <class Format>
SlotPlan<Format>::SlotPlan(World world, SlotShape slots, std::span<const Segment<Format>> segments,
                           std::int64_t granule, int most_hops)
    : world_(std::move(world)),
      slots_(checked(std::move(slots), world_, segments)),
      segments_(segments.begin(), segments.end()),
      description_(slots_.to_string() + " " + describe(segments)),
      chunks_(world_.chunk_bytes, topology().size(), segments, slots_.dtype, granule, parts_of(topology(), most_hops)) {
}

// --- GatherPlan

GatherPlan::GatherPlan(World world, SlotShape slots, GatherSegments segments, bool in_one_hop, std::int64_t granule,
                       bool in_one_chunk)
    : SlotPlan(std::move(world), std::move(slots), segments, granule,
               in_one_chunk ? 0
               : in_one_hop ? 1
                            : 2),
      is_in_one_chunk_(in_one_chunk),
      is_in_one_hop_(in_one_hop && topology().is_hierarchical()),
      longest_(slots_.longest()),
      hops_(topology().gather_hops(rank(), in_one_hop)),
      secondary_hop_(topology().secondary_hop(rank())) {
  if (is_in_one_hop_) description_ += " in one hop";
  if (in_one_chunk) description_ += " in one chunk";
  const std::vector<int> order = num_hops() == 2 ? in_order_of_hops(topology(), rank()) : in_rank_order(topology());
  const std::vector<int> held = held_of(topology(), rank(), order);
  order_ = places_in(order, topology());
  places_ = places_in(held, topology());
  num_held_ = held.size();
  wire_offsets_.push_back(0);
  for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
    wire_offsets_.push_back(wire_offsets_.back() +
                            message_bytes(pieces(chunk), longest_, slots_.dtype, std::identity()));
  }
}

std::size_t GatherPlan::num_bytes(int slot, std::int64_t chunk) const {
  const std::int64_t length = slots_.lengths[static_cast<std::size_t>(slot)];
  return length == longest_ ? slot_bytes(chunk) : message_bytes(pieces(chunk), length, slots_.dtype, std::identity());
}

std::size_t GatherPlan::largest_secondary_bytes() const { return most_held(topology()) * wire_offsets_.back(); }

LinkBytes GatherPlan::bytes_of(const Hop& hop) const {
  LinkBytes total;
  for (const Move& move : hop.sends) {
    std::size_t& sent = total.on(topology().link(rank(), move.peer));
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) sent += num_bytes(move.slot, chunk);
  }
  return total;
}

// --- LosslessPlan

LosslessPlan::LosslessPlan(World world, const SlotShape& slots, GatherSegments segments)
    : SlotPlan(std::move(world), slots, whole_slot(slots), kLosslessTile),
      inter_node_hop_(topology().holder_hop(rank())),
      intra_node_hop_(topology().secondary_hop(rank())),
      slot_bytes_(wire_bytes({}, slots_.dtype, slots_.longest())),
      held_(held_of(topology(), rank(), in_rank_order(topology()))),
      places_(places_in(held_, topology())) {
  check_argument(slots_.dtype != DType::float32,
                 "slots: expected bfloat16, float16 or values of 8 bits, of which differences are made, got float32");
  description_ = slots_.to_string() + " by differences";
  if (!segments.empty()) {
    checked(slots_, world_, segments);
    for (const Segment<BlockFormat>& segment : segments) {
      check_argument(segment.format.kind == ElementKind::exact, "segments: expected exact ones, got ",
                     segment.format.to_string());
    }
    segments_.assign(segments.begin(), segments.end());
  }
  cut_at_segments();
}

void LosslessPlan::cut_at_segments() {
  for (std::int64_t i = 0; i < num_chunks(); ++i) {
    std::vector<Piece<BlockFormat>>& parts = parts_.emplace_back();
    const std::int64_t chunk_end = chunk(i).begin + chunk(i).count;
    std::int64_t first = 0;
    for (std::size_t segment = 0; segment < segments_.size(); ++segment) {
      const std::int64_t begin = std::max(first, chunk(i).begin);
      const std::int64_t count = std::min(first + segments_[segment].num_elements, chunk_end) - begin;
      if (count > 0) parts.push_back({begin, count, {}, segment, begin - first});
      first += segments_[segment].num_elements;
    }
  }
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

std::size_t LosslessPlan::largest_secondary_bytes() const { return most_held(topology()) * slot_bytes_; }

// --- ReducePlan

ReducePlan::ReducePlan(World world, SlotShape slots, ReduceSegments segments, std::optional<BlockFormat> feedback)
    // Aligns chunks so that no block of a residual straddles two pieces.
    : SlotPlan(std::move(world), std::move(slots), segments, feedback ? granule_of(*feedback) : 1),
      feedback_(feedback),
      hops_(topology().reduce_hops(rank())) {
  check_float(slots_.dtype);
  for (const Segment<HopFormats>& segment : segments) {
    const BlockFormat intra = segment.format.intra_node, inter = segment.format.inter_node;
    for (const BlockFormat source : {intra, inter}) {
      for (const BlockFormat target : {intra, inter, feedback.value_or(BlockFormat())}) check_summed(source, target);
    }
  }
  if (!feedback) return;
  check_format(*feedback);
  lay_out_residual(*feedback);
}

void ReducePlan::lay_out_residual(BlockFormat feedback) {
  const Link link = topology().num_nodes() == 1 ? Link::intra_node : Link::inter_node;
  residual_offsets_.resize(slots_.lengths.size());
  for (const int owner : topology().residual_owners(rank())) {
    const auto slot = static_cast<std::size_t>(owner);
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      for (const Piece<HopFormats>& piece : pieces(chunk)) {
        residual_offsets_[slot].push_back(residual_bytes_);
        if (piece.format.on(link).kind == ElementKind::exact) continue;
        const std::int64_t count = std::clamp<std::int64_t>(slots_.lengths[slot] - piece.begin, 0, piece.count);
        residual_bytes_ += wire_bytes(feedback, DType::float32, count);
      }
    }
  }
}

std::size_t ReducePlan::num_bytes(int slot, std::int64_t chunk, Link link, DType dtype) const {
  return message_bytes(pieces(chunk), slots_.lengths[static_cast<std::size_t>(slot)], dtype, on(link));
}

std::size_t ReducePlan::largest_bytes(Link link, DType dtype) const {
  return largest_message(chunks_, slots_.longest(), dtype, on(link));
}

std::size_t ReducePlan::largest_sum_bytes() const {
  return largest_message(chunks_, slots_.longest(), DType::float32, [](const HopFormats&) { return BlockFormat{}; });
}

std::array<LinkBytes, 2> ReducePlan::bytes_by_hop() const {
  std::array<LinkBytes, 2> totals;
  for (std::size_t i = 0; i < hops_.size(); ++i) {
    const DType dtype = i == 0 ? slots_.dtype : DType::float32;  // sums are sent on
    for (const Move& move : hops_[i].sends) {
      const Link link = topology().link(rank(), move.peer);
      for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
        totals[i].on(link) += num_bytes(move.slot, chunk, link, dtype);
      }
    }
  }
  return totals;
}

LinkBytes ReducePlan::bytes() const {
  const auto [first, second] = bytes_by_hop();
  return first + second;
}

// --- AllReducePlan

AllReducePlan::AllReducePlan(const World& world, std::int64_t num_elements, DType dtype, HopFormats formats,
                             std::optional<BlockFormat> feedback)
    : AllReducePlan(world,
                    shape_of(split(TensorView{nullptr, num_elements, dtype}, world.topology.size(),
                                   shard_of_whole_blocks(num_elements, world.topology.size(), formats))),
                    formats, feedback) {}

AllReducePlan::AllReducePlan(const World& world, const SlotShape& slots, HopFormats formats,
                             std::optional<BlockFormat> feedback)
    : num_elements_(0),
      reduce_(world, slots, std::vector<Segment<HopFormats>>{{slots.longest(), formats}}, feedback),
      gather_(world, slots, std::vector<Segment<BlockFormat>>{{slots.longest(), formats.intra_node}}, false,
              std::lcm(granule_of(formats), feedback ? granule_of(*feedback) : 1)) {
  for (const std::int64_t length : slots.lengths) num_elements_ += length;
  description_ = SlotShape{{num_elements_}, slots.dtype}.to_string() + " " + formats.to_string();
}

std::array<LinkBytes, 4> AllReducePlan::bytes_by_hop() const {
  const auto reduced = reduce_.bytes_by_hop();
  const auto gathered = gather_.bytes_by_hop();
  return {reduced[0], reduced[1], gathered[0], gathered[1]};
}

}  // namespace zcomm
