#include "zcomm/communicator.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

// Shortest digits that tell one float from all others.
std::string exact_digits(float value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

// "float32[2 x 12]": what peers compare, and what error messages show.
template <class Views>
std::string describe(const Views& views) {
  const bool even = std::all_of(views.begin(), views.end(),
                                [&](const auto& view) { return view.num_elements == views.front().num_elements; });
  std::string text(to_string(views.front().dtype));
  if (even) return text + "[" + std::to_string(views.size()) + " x " + std::to_string(views.front().num_elements) + "]";
  text += "[";
  for (const auto& view : views) text += std::to_string(view.num_elements) + ",";
  text.back() = ']';
  return text;
}

template <class Views>
std::int64_t longest(const Views& slots) {
  std::int64_t num_elements = 0;
  for (const auto& slot : slots) num_elements = std::max(num_elements, slot.num_elements);
  return num_elements;
}

// "int8:256", or the number of the segments and a hash of them.
template <class Format>
std::string describe(std::span<const Segment<Format>> segments) {
  if (segments.size() == 1) return segments[0].format.to_string();
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const Segment<Format>& segment : segments) {
    for (const char c : std::to_string(segment.num_elements) + " " + segment.format.to_string() + ",") {
      hash = (hash ^ static_cast<std::uint8_t>(c)) * 0x100000001b3;
    }
  }
  return std::to_string(segments.size()) + " segments #" + std::to_string(hash);
}

template <class Format, class Views>
void check_segments(std::span<const Segment<Format>> segments, const Views& slots) {
  std::int64_t total = 0;
  for (const Segment<Format>& segment : segments) {
    check_argument(segment.num_elements >= 0, [&] {
      return "segments: got one of " + std::to_string(segment.num_elements) + " elements, need 0 or more";
    });
    total += segment.num_elements;
  }
  check_argument(total == longest(slots), [&] {
    return "segments: got " + std::to_string(total) + " elements, need those of the longest slot, " +
           std::to_string(longest(slots));
  });
}

std::string describe(const Feedback* feedback) {
  std::string text;
  if (feedback != nullptr) text.append(" with feedback in ").append(feedback->format.to_string());
  return text;
}

void check_feedback(const Feedback* feedback) {
  if (feedback == nullptr) return;
  const BlockFormat format = feedback->format;
  check_argument(format.kind != ElementKind::exact && !format.stochastic, [&] {
    return "feedback.format: got " + format.to_string() + ", need a lossy format that rounds to nearest";
  });
  check_argument(reinterpret_cast<std::uintptr_t>(feedback->residual) % kWireAlignment == 0, [] {
    return "feedback.residual: need an address that is a multiple of " + std::to_string(kWireAlignment);
  });
  check_argument(feedback->decay >= 0.0f && feedback->decay <= 1.0f,
                 [&] { return "feedback.decay: got " + exact_digits(feedback->decay) + ", need 0 to 1"; });
}

template <class Views>
void check_slots(const Views& slots, int size, int rank, std::int64_t own_elements, DType dtype, const char* own_name) {
  check_argument(slots.size() == static_cast<std::size_t>(size), [&] {
    return "slots: got " + std::to_string(slots.size()) + ", need one for each of " + std::to_string(size) + " ranks";
  });
  for (const auto& slot : slots) {
    check_argument(slot.dtype == dtype, [&] {
      return "slots: got dtype " + std::string(to_string(slot.dtype)) + ", need that of `" + own_name + "`, " +
             std::string(to_string(dtype));
    });
  }
  const std::int64_t slot_elements = slots[static_cast<std::size_t>(rank)].num_elements;
  check_argument(slot_elements == own_elements, [&] {
    return std::string(own_name) + ": got " + std::to_string(own_elements) + " elements, need those of slot " +
           std::to_string(rank) + ", " + std::to_string(slot_elements);
  });
}

std::vector<int> peers_of(const Topology& topology, int rank) {
  std::vector<int> peers;
  for (int peer = 0; peer < topology.size(); ++peer) {
    const bool met = !topology.is_hierarchical() || topology.same_node(rank, peer) ||
                     topology.local_rank(rank) == topology.local_rank(peer);
    if (met && peer != rank) peers.push_back(peer);
  }
  return peers;
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
                           std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes)
    : workspace_(std::move(workspace)),
      codec_(std::move(codec)),
      transport_(std::move(transport)),
      topology_(std::move(topology)),
      peers_(peers_of(topology_, transport_->rank())),
      chunk_bytes_(chunk_bytes) {
  check_argument(topology_.size() == transport_->size(), [&] {
    return "topology: got " + std::to_string(topology_.size()) + " ranks, need " + std::to_string(transport_->size());
  });
  for (const int peer : peers_) {
    if (topology_.same_node(rank(), peer)) node_peers_.push_back(peer);
  }
  check_argument(chunk_bytes > 0, [] { return std::string("chunk_bytes: got 0, need at least 1"); });
}

template <class Body>
CallStats Communicator::run(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                            StreamView stream, Body&& body) {
  CallStats stats;
  const std::uint64_t seed =
      seed_ + 0x9e3779b97f4a7c15 * ++num_calls_;  // no two calls of one seed, nor of seeds nearby
  try {
    transport_->begin(call, peers, timeout);
    body(Resources{*codec_, *transport_, topology_, *workspace_, chunk_bytes_, stream, stats, seed});
  } catch (const std::exception& error) {
    // Peers wait for bytes that will not come.
    transport_->abort("in " + call + ": " + error.what());
    throw;
  }
  return stats;
}

CallStats Communicator::all_gather(ConstTensorView shard, std::span<const TensorView> slots, GatherSegments segments,
                                   std::chrono::milliseconds timeout, StreamView stream, GatherExtras extras) {
  check_slots(slots, size(), rank(), shard.num_elements, shard.dtype, "shard");
  check_segments(segments, slots);
  check_argument(extras.secondary == nullptr || extras.reference == nullptr,
                 [] { return std::string("reference: got one beside a secondary shard, need one of the two"); });
  const std::byte* const end = shard.data + shard.num_bytes();
  check_argument(
      extras.reference == nullptr || extras.reference >= end || extras.reference + shard.num_bytes() <= shard.data,
      [] { return std::string("reference: got memory of the shard, need memory of its own"); });
  const char* what = extras.secondary != nullptr   ? " keeping secondary shards"
                     : extras.reference != nullptr ? " of differences"
                                                   : "";
  return run("all_gather " + describe(slots) + " " + describe(segments) + what, peers_, timeout, stream,
             [&](const Resources& resources) { zcomm::all_gather(resources, shard, slots, segments, extras); });
}

CallStats Communicator::all_gather(ConstTensorView shard, std::span<const TensorView> slots, BlockFormat format,
                                   std::chrono::milliseconds timeout, StreamView stream, GatherExtras extras) {
  const Segment<BlockFormat> whole{longest(slots), format};
  return all_gather(shard, slots, {&whole, 1}, timeout, stream, extras);
}

CallStats Communicator::gather_secondary(const std::byte* secondary, std::span<const TensorView> slots,
                                         GatherSegments segments, std::chrono::milliseconds timeout,
                                         StreamView stream) {
  const TensorView& own = slots[static_cast<std::size_t>(rank())];
  check_slots(slots, size(), rank(), own.num_elements, own.dtype, "slots");
  check_segments(segments, slots);
  return run("gather_secondary " + describe(slots) + " " + describe(segments), node_peers_, timeout, stream,
             [&](const Resources& resources) { zcomm::gather_secondary(resources, secondary, slots, segments); });
}

CallStats Communicator::reduce_scatter(std::span<const ConstTensorView> slots, TensorView output,
                                       ReduceSegments segments, float factor, std::chrono::milliseconds timeout,
                                       StreamView stream, const Feedback* feedback) {
  check_slots(slots, size(), rank(), output.num_elements, output.dtype, "output");
  check_segments(segments, slots);
  check_feedback(feedback);
  return run("reduce_scatter " + describe(slots) + " " + describe(segments) + " times " + exact_digits(factor) +
                 describe(feedback),
             peers_, timeout, stream, [&](const Resources& resources) {
               zcomm::reduce_scatter(resources, slots, output, segments, factor, feedback);
             });
}

CallStats Communicator::reduce_scatter(std::span<const ConstTensorView> slots, TensorView output, HopFormats formats,
                                       float factor, std::chrono::milliseconds timeout, StreamView stream) {
  const Segment<HopFormats> whole{longest(slots), formats};
  return reduce_scatter(slots, output, {&whole, 1}, factor, timeout, stream);
}

CallStats Communicator::all_reduce(TensorView tensor, HopFormats formats, float factor,
                                   std::chrono::milliseconds timeout, StreamView stream, const Feedback* feedback) {
  check_feedback(feedback);
  const std::span<const TensorView> whole(&tensor, 1);
  return run("all_reduce " + describe(whole) + " " + formats.to_string() + " times " + exact_digits(factor) +
                 describe(feedback),
             peers_, timeout, stream,
             [&](const Resources& resources) { zcomm::all_reduce(resources, tensor, formats, factor, feedback); });
}

void Communicator::round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream) const {
  check_argument(decoded.num_elements == values.num_elements, [&] {
    return "decoded: got " + std::to_string(decoded.num_elements) + " elements, need those of `values`, " +
           std::to_string(values.num_elements);
  });
  const Scratch wire(*workspace_, WireLayout(format, values.dtype, values.num_elements).num_bytes, stream);
  const Encode encode{values, format, wire.data(), {}};
  codec_->encode({&encode, 1}, stream);
  const Decode decode{{wire.data(), format, values.dtype}, decoded};
  codec_->decode({&decode, 1}, stream);
}

}  // namespace zcomm
