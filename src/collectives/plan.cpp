#include "zcomm/plan.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "hash.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

// Returns "int8:256", or the number of segments and a hash of them. Ranks compare it: a change breaks the protocol.
template <class Format>
std::string describe(std::span<const Segment<Format>> segments) {
  if (segments.size() == 1) return segments[0].format.to_string();
  std::uint64_t hash = kFnvBasis;
  for (const Segment<Format>& segment : segments) {
    hash = fnv1a(std::to_string(segment.num_elements) + " " + segment.format.to_string() + ",", hash);
  }
  return std::to_string(segments.size()) + " segments #" + std::to_string(hash);
}

// Returns `slots`.
template <class Format>
SlotShape checked(SlotShape slots, const World& world, std::span<const Segment<Format>> segments) {
  const Topology& topology = world.topology;
  check_argument(world.rank >= 0 && world.rank < topology.size(), [&] {
    return "rank: expected 0 to " + std::to_string(topology.size() - 1) + ", got " + std::to_string(world.rank);
  });
  check_argument(world.chunk_bytes > 0, [] { return std::string("chunk_bytes: expected at least 1, got 0"); });
  check_argument(slots.lengths.size() == static_cast<std::size_t>(topology.size()), [&] {
    return "slots: expected one for each of " + std::to_string(topology.size()) + " ranks, got " +
           std::to_string(slots.lengths.size());
  });
  for (const std::int64_t length : slots.lengths) {
    check_argument(length >= 0,
                   [&] { return "slots: expected 0 or more elements in each, got " + std::to_string(length); });
  }
  std::int64_t total = 0;
  for (const Segment<Format>& segment : segments) {
    check_argument(segment.num_elements >= 0, [&] {
      return "segments: expected 0 or more elements in each, got " + std::to_string(segment.num_elements);
    });
    total += segment.num_elements;
  }
  check_argument(total == slots.longest(), [&] {
    return "segments: expected the " + std::to_string(slots.longest()) + " elements of the longest slot, got " +
           std::to_string(total);
  });
  return slots;
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

void add(LinkBytes& total, Link link, std::size_t num_bytes) {
  if (link == Link::intra_node) {
    total.intra_node += num_bytes;
  } else {
    total.inter_node += num_bytes;
  }
}

int num_held(const Topology& topology, int rank) {
  int count = 0;
  for (int slot = 0; slot < topology.size(); ++slot) {
    if (topology.holder(topology.node(rank), slot) == rank) ++count;
  }
  return count;
}

// Returns the most slots that any rank holds.
int most_held(const Topology& topology) {
  int most = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    // Looks at the first rank of each node: slots are dealt to a node's ranks in turn, the first one first.
    most = std::max(most, num_held(topology, topology.ranks(node).front()));
  }
  return most;
}

std::vector<int> in_rank_order(const Topology& topology) {
  std::vector<int> slots(static_cast<std::size_t>(topology.size()));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// Returns all slots by local rank, each time that of the own node first: what a rank forwards lies side by side.
std::vector<int> in_order_of_hops(const Topology& topology, int rank) {
  std::vector<int> slots = in_rank_order(topology);
  const auto key = [&](int slot) { return std::pair(topology.local_rank(slot), !topology.same_node(slot, rank)); };
  std::stable_sort(slots.begin(), slots.end(), [&](int a, int b) { return key(a) < key(b); });
  return slots;
}

// Returns the place of each rank's slot among those that `rank` holds, in a given order, -1 if it does not hold it.
std::vector<int> places_of(const Topology& topology, int rank, const std::vector<int>& slots) {
  std::vector<int> places(slots.size(), -1);
  int num_held = 0;
  for (const int slot : slots) {
    if (topology.holder(topology.node(rank), slot) == rank) places[static_cast<std::size_t>(slot)] = num_held++;
  }
  return places;
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

// --- GatherPlan

GatherPlan::GatherPlan(World world, SlotShape slots, GatherSegments segments, bool in_one_hop, std::int64_t granule)
    : world_(std::move(world)),
      slots_(checked(std::move(slots), world_, segments)),
      segments_(segments.begin(), segments.end()),
      is_in_one_hop_(in_one_hop && topology().is_hierarchical()),
      description_(slots_.to_string() + " " + describe(segments) + (is_in_one_hop_ ? " in one hop" : "")),
      chunks_(world_.chunk_bytes, topology().size(), segments, slots_.dtype, granule),
      longest_(slots_.longest()),
      hops_(topology().gather_hops(rank(), in_one_hop)),
      secondary_hop_(topology().secondary_hop(rank())),
      order_(slots_.lengths.size()),
      num_held_(zcomm::num_held(topology(), rank())) {
  const std::vector<int> order = num_hops() == 2 ? in_order_of_hops(topology(), rank()) : in_rank_order(topology());
  for (std::size_t i = 0; i < order.size(); ++i) order_[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  places_ = places_of(topology(), rank(), order);
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

std::size_t GatherPlan::largest_secondary_bytes() const {
  return static_cast<std::size_t>(most_held(topology())) * wire_offsets_.back();
}

LinkBytes GatherPlan::bytes_of(const Hop& hop) const {
  LinkBytes total;
  for (const Move& move : hop.sends) {
    std::size_t sent = 0;
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) sent += num_bytes(move.slot, chunk);
    add(total, topology().link(rank(), move.peer), sent);
  }
  return total;
}

CodecPasses GatherPlan::passes() const {
  CodecPasses passes{slots_.lengths[static_cast<std::size_t>(rank())], 0};
  for (const std::int64_t length : slots_.lengths) passes.decoded += length;
  return passes;
}

// --- LosslessPlan

namespace {

std::vector<Segment<BlockFormat>> whole_slot(const SlotShape& slots) {
  return {{slots.lengths.empty() ? 0 : slots.longest(), {}}};
}

}  // namespace

LosslessPlan::LosslessPlan(World world, const SlotShape& slots, GatherSegments segments)
    : world_(std::move(world)),
      slots_(checked<BlockFormat>(slots, world_, segments.empty() ? GatherSegments(whole_slot(slots)) : segments)),
      segments_(segments.empty() ? whole_slot(slots) : std::vector(segments.begin(), segments.end())),
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

CodecPasses LosslessPlan::passes() const {
  CodecPasses passes;
  if (!inter_node_hop_.sends.empty()) passes.encoded = slots_.lengths[static_cast<std::size_t>(rank())];
  for (const Move& move : inter_node_hop_.recvs) passes.decoded += slots_.lengths[static_cast<std::size_t>(move.slot)];
  return passes;
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

// --- ReducePlan

namespace {

// Chunks of exact sums in one node: what is sent is in a cache still when it is summed.
constexpr std::size_t kNodeChunkBytes = std::size_t{256} << 10;

std::size_t chunk_bytes_of(const World& world, ReduceSegments segments) {
  const bool is_direct = !segments.empty() && segments.front().format.direct;
  return is_direct && world.topology.num_nodes() == 1 ? std::min(world.chunk_bytes, kNodeChunkBytes)
                                                      : world.chunk_bytes;
}

}  // namespace

ReducePlan::ReducePlan(World world, SlotShape slots, ReduceSegments segments, std::optional<BlockFormat> feedback)
    : world_(std::move(world)),
      slots_(checked(std::move(slots), world_, segments)),
      segments_(segments.begin(), segments.end()),
      feedback_(feedback),
      description_(slots_.to_string() + " " + describe(segments)),
      // Aligns chunks so that no block of a residual straddles two pieces.
      chunks_(chunk_bytes_of(world_, segments), topology().size(), segments, slots_.dtype,
              feedback ? granule_of(*feedback) : 1),
      hops_(is_direct() ? std::array{topology().direct_hop(rank()), Hop{}} : topology().reduce_hops(rank())) {
  check_argument(std::all_of(segments_.begin(), segments_.end(),
                             [this](const Segment<HopFormats>& s) { return s.format.direct == is_direct(); }),
                 [] { return std::string("segments: expected direct formats in each or in none, got them in some"); });
  if (feedback) lay_out_residual(*feedback);
}

void ReducePlan::lay_out_residual(BlockFormat feedback) {
  const Link link = topology().num_nodes() == 1 ? Link::intra_node : Link::inter_node;
  first_residual_.assign(slots_.lengths.size(), -1);
  for (const int owner : topology().residual_owners(rank())) {
    const auto slot = static_cast<std::size_t>(owner);
    first_residual_[slot] = static_cast<std::ptrdiff_t>(residual_offsets_.size());
    for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      for (const Piece<HopFormats>& piece : pieces(chunk)) {
        residual_offsets_.push_back(residual_bytes_);
        if (piece.format.on(link).kind == ElementKind::exact) continue;
        const std::int64_t count = std::clamp<std::int64_t>(slots_.lengths[slot] - piece.begin, 0, piece.count);
        residual_bytes_ += wire_bytes(feedback, DType::float32, count);
      }
    }
  }
}

std::size_t ReducePlan::num_bytes(int slot, std::int64_t chunk, Link link, DType dtype) const {
  if (is_direct()) {
    const std::span<const Piece<HopFormats>> values = pieces(chunk);
    const std::int64_t end = values.back().begin + values.back().count;
    const std::int64_t length = slots_.lengths[static_cast<std::size_t>(slot)];
    const std::int64_t count = std::clamp<std::int64_t>(length, values.front().begin, end) - values.front().begin;
    return static_cast<std::size_t>(count) * element_size(dtype);
  }
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
        add(totals[i], link, num_bytes(move.slot, chunk, link, dtype));
      }
    }
  }
  return totals;
}

LinkBytes ReducePlan::bytes() const {
  const auto [first, second] = bytes_by_hop();
  return first + second;
}

CodecPasses ReducePlan::passes() const {
  CodecPasses passes;
  for (const Hop& hop : hops_) {
    for (const Move& move : hop.sends) {
      if (!is_direct()) passes.encoded += slots_.lengths[static_cast<std::size_t>(move.slot)];
    }
    for (const Move& move : hop.recvs) passes.decoded += slots_.lengths[static_cast<std::size_t>(move.slot)];
  }
  return passes;
}

// --- AllReducePlan

std::vector<TensorView> all_reduce_slots(TensorView tensor, int size, HopFormats formats) {
  const std::int64_t granule = granule_of(formats);
  const std::int64_t even = (tensor.num_elements + size - 1) / size;
  return split(tensor, size, (even + granule - 1) / granule * granule);
}

namespace {

SlotShape all_reduce_shape(std::int64_t num_elements, DType dtype, int size, HopFormats formats) {
  check_argument(!formats.direct,
                 [&] { return "formats: expected some that are not direct, got " + formats.to_string(); });
  return shape_of(all_reduce_slots({nullptr, num_elements, dtype}, size, formats));
}

}  // namespace

AllReducePlan::AllReducePlan(const World& world, std::int64_t num_elements, DType dtype, HopFormats formats,
                             std::optional<BlockFormat> feedback)
    : AllReducePlan(world, all_reduce_shape(num_elements, dtype, world.topology.size(), formats), formats, feedback) {}

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

CodecPasses AllReducePlan::passes() const {
  const CodecPasses reduced = reduce_.passes();
  const CodecPasses gathered = gather_.passes();
  return {reduced.encoded + gathered.encoded, reduced.decoded + gathered.decoded};
}

}  // namespace zcomm
