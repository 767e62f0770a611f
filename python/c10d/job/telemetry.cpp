#include "telemetry.hpp"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "c10d/base/tensors.hpp"
#include "job.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr std::int64_t kSampleElements = 16384;
constexpr std::int64_t kBlockWithoutScales = 256;
constexpr std::size_t kMaxSites = 1000;  // bounds programs whose tensors differ in every step

std::int64_t block_of(BlockFormat format) { return format.has_scales() ? format.block_size : kBlockWithoutScales; }

std::string name_of(Collective collective, std::span<const ConstTensorView> slots, int size) {
  std::int64_t elements = 0;
  for (const ConstTensorView& slot : slots) elements += slot.num_elements;
  if (collective == Collective::all_gather) elements *= size;
  return std::string(to_string(collective)) + " of " + std::to_string(elements) + " " +
         std::string(to_string(slots[0].dtype));
}

// Slots that this rank encodes in one format, in rank order, with the name of their link.
using Encoded = std::tuple<const char*, BlockFormat, std::vector<ConstTensorView>>;

std::vector<Encoded> encoded_by(const Communicator& communicator, Collective collective,
                                std::span<const ConstTensorView> slots, HopFormats formats, std::size_t min_bytes) {
  if (traits_of(collective).has_one_format) return {{"all", formats.intra_node, {slots[0]}}};
  const Topology& topology = communicator.topology();
  const int rank = communicator.rank();
  std::vector<int> intra_node, inter_node;
  const auto add = [&](int peer, int slot) {
    (topology.same_node(rank, peer) ? intra_node : inter_node).push_back(slot);
  };
  if (is_exchange(collective)) {
    for (const int peer : topology.others(rank)) {
      const ConstTensorView& slot = slots[static_cast<std::size_t>(peer)];
      if (slot.num_elements > 0 && slot.num_bytes() >= min_bytes) add(peer, peer);
    }
  } else {
    for (const Hop& hop : topology.reduce_hops(rank)) {
      for (const Move& move : hop.sends) add(move.peer, move.slot);
    }
  }
  const auto views = [&](std::vector<int>& of) {
    std::sort(of.begin(), of.end());
    std::vector<ConstTensorView> found;
    // Returns the whole tensor of an all-reduce as one view: its shards have whole blocks.
    for (const int slot : of) found.push_back(slots.size() == 1 ? slots[0] : slots[static_cast<std::size_t>(slot)]);
    return found;
  };
  return {{"intra_node", formats.intra_node, views(intra_node)}, {"inter_node", formats.inter_node, views(inter_node)}};
}

// Returns sample `number` of `slots`: in turn the first piece of each, the second of each, ...
ConstTensorView piece_of(const std::vector<ConstTensorView>& slots, std::uint64_t number, std::int64_t block) {
  const ConstTensorView& slot = slots[number % slots.size()];
  const std::int64_t length = kSampleElements / block * block;
  const std::int64_t num_pieces = std::max<std::int64_t>((slot.num_elements + length - 1) / length, 1);
  return slot.slice(static_cast<std::int64_t>(number / slots.size()) % num_pieces * length, length);
}

bool is_lossy(const Segment<HopFormats>& segment) { return segment.num_elements > 0 && !segment.format.is_exact(); }

// Measures two tensors [blocks, block] of float32 in float64 by operations of torch, queued on the current stream of
// their device. Returns double [7]: see Loss.
at::Tensor measure(const at::Tensor& original, const at::Tensor& decoded) {
  const at::Tensor x = original.to(at::kDouble);
  const at::Tensor error = decoded.to(at::kDouble).sub_(x).abs_();
  const at::Tensor size = x.abs().amax(1);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor largest_error = error.amax(1);
  const at::Tensor finite = (size < kInfinity).logical_and_(largest_error < kInfinity);  // false for NaN
  const at::Tensor nonzero = x != 0;
  const at::Tensor block_errors = largest_error / size.clamp_min(std::numeric_limits<double>::min());
  const at::Tensor by_block = at::stack({at::ones_like(size), nonzero.sum(1, false, at::kDouble),
                                         nonzero.logical_and(decoded == 0).sum(1, false, at::kDouble),
                                         x.square().sum(1), error.square().sum(1), block_errors});
  const at::Tensor kept = by_block.masked_fill(finite.logical_not(), 0);
  return at::cat({kept.sum(1), kept[5].amax().unsqueeze(0)});
}

}  // namespace

void Telemetry::starts(const Job& job, Communicator& communicator, StreamView stream) {
  if (every_ == 0 || job.settings.rehearsal) return;
  const bool in_place = job.call.collective == Collective::all_reduce;
  if (!in_place && job.read.empty()) return;  // nothing is encoded
  // Skips calls in a graph, because a replay would only add to the sums.
  if (!job.outputs[0].is_cpu() && is_capturing(stream)) return;
  const std::vector<Segment<HopFormats>> segments = job.operation->segments();
  const auto num_lossy = static_cast<std::size_t>(std::count_if(segments.begin(), segments.end(), is_lossy));
  // One view for each slot and segment, in place of one for each slot.
  const auto num_ranks = static_cast<std::size_t>(job.operation->world().topology.size());
  const std::size_t num_slots = job.call.collective == Collective::all_gather ? 1 : num_ranks;
  const bool by_segment = segments.size() > 1 && job.read.size() == num_slots * segments.size();
  std::int64_t begin = 0;
  std::size_t index = 0;
  for (std::size_t number = 0; number < segments.size(); ++number) {
    const Segment<HopFormats>& segment = segments[number];
    if (is_lossy(segment)) {
      std::vector<ConstTensorView> parts;
      for (std::size_t i = 0; i < job.read.size(); ++i) {
        if (!by_segment) parts.push_back(job.read[i].slice(begin, segment.num_elements));
        if (by_segment && i % segments.size() == number) parts.push_back(job.read[i]);
      }
      if (in_place) parts = {job.written.front().slice(begin, segment.num_elements)};
      const std::string site = job.site ? job.site->name_of_part(index++, num_lossy) : "";
      count(job, site, parts, segment.format, communicator, stream);
    }
    begin += segment.num_elements;
  }
}

void Telemetry::count(const Job& job, const std::string& site, std::span<const ConstTensorView> slots,
                      HopFormats formats, Communicator& communicator, StreamView stream) {
  const c10::InferenceMode plain_tensors;
  const std::lock_guard lock(mutex_);
  std::pair key{job.call.collective, site.empty() ? name_of(job.call.collective, slots, communicator.size()) : site};
  if (site.empty() && calls_.size() >= kMaxSites && !calls_.contains(key)) {
    key.second = std::string(to_string(job.call.collective)) + " of other sizes";
  }
  if (calls_[key]++ % static_cast<std::uint64_t>(every_) != 0) return;
  for (const auto& [link, format, encoded] :
       encoded_by(communicator, job.call.collective, slots, formats, job.operation->min_bytes())) {
    if (encoded.empty() || format.kind == ElementKind::exact) continue;
    const ErrorKey error_key{key.first, key.second, link, format.to_string()};
    const ConstTensorView values = piece_of(encoded, errors_[error_key].samples, block_of(format));
    // A gathered or exchanged value is rounded to its type again; the terms of a sum are float32.
    const DType decoded_dtype = traits_of(job.call.collective).is_sum ? DType::float32 : values.dtype;
    sample(error_key, values, format, decoded_dtype, job.outputs[0].device(), communicator, stream);
  }
}

void Telemetry::sample(const ErrorKey& key, ConstTensorView values, BlockFormat format, DType decoded_dtype,
                       at::Device device, Communicator& communicator, StreamView stream) {
  const std::int64_t block = block_of(format);
  const std::int64_t num_blocks = (values.num_elements + block - 1) / block;
  // Zeros fill the last block: they are exact, and change none of the sums.
  const auto through = [&](BlockFormat wire_format, DType dtype) {
    at::Tensor result = at::zeros({num_blocks, block}, at::device(device).dtype(scalar_type_of(dtype)));
    communicator.round_trip(values, wire_format,
                            {static_cast<std::byte*>(result.data_ptr()), values.num_elements, dtype}, stream);
    return result;
  };
  const at::Tensor measured = measure(through({}, DType::float32), through(format, decoded_dtype).to(at::kFloat));
  QuantizationError& error = errors_[key];
  ++error.samples;
  error.elements += static_cast<double>(values.num_elements);
  error.blocks += static_cast<double>(num_blocks);
  const auto [found, is_new] = measures_.try_emplace({key, device.type(), stream.handle}, measured);
  if (is_new) return;
  const at::Tensor& measures = found->second;
  const at::Tensor largest = at::maximum(measures[6], measured[6]);
  measures.add_(measured)[6].copy_(largest);
}

std::map<ErrorKey, QuantizationError> Telemetry::read() {
  const c10::InferenceMode plain_tensors;
  const std::lock_guard lock(mutex_);
  std::map<ErrorKey, QuantizationError> errors = errors_;
  for (auto& [key, error] : errors) error.calls = calls_.at({std::get<0>(key), std::get<1>(key)});
  for (const auto& [key_and_stream, measures] : measures_) {
    // Waits for the stream of the measures: the copy below runs on the current stream.
    if (const at::Device device = measures.device(); !device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
    }
    const at::Tensor on_host = measures.cpu();
    const double* values = on_host.const_data_ptr<double>();
    std::array<double, 7>& sums = errors.at(std::get<0>(key_and_stream)).measures;
    const double largest = std::max(sums[6], values[6]);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
    sums[6] = largest;
  }
  return errors;
}

}  // namespace zcomm::c10d_binding
