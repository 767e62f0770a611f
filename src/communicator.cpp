#include "zcomm/communicator.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "codec/checks.hpp"
#include "collectives/device_gathers.hpp"
#include "collectives/random_seed.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/wire_layout.hpp"

namespace zcomm {
namespace {

// Shortest digits that tell one float from all others.
std::string exact_digits(float value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

template <class Views>
std::int64_t longest(const Views& slots) {
  std::int64_t num_elements = 0;
  for (const auto& slot : slots) num_elements = std::max(num_elements, slot.num_elements);
  return num_elements;
}

std::string describe(const Feedback* feedback) {
  std::string text;
  if (feedback != nullptr) text.append(" with feedback in ").append(feedback->format.to_string());
  return text;
}

std::optional<BlockFormat> format_of(const Feedback* feedback) {
  if (feedback == nullptr) return std::nullopt;
  return feedback->format;
}

// `planned`: the format of the residual that the plan knows.
void check_feedback(const Feedback* feedback, const std::optional<BlockFormat>& planned) {
  const auto name = [](const std::optional<BlockFormat>& format) { return format ? format->to_string() : "none"; };
  check_argument(format_of(feedback) == planned, [&] {
    return "feedback: expected a residual in the plan's format, " + name(planned) + ", got " +
           name(format_of(feedback));
  });
  if (feedback == nullptr) return;
  const BlockFormat format = feedback->format;
  check_argument(format.kind != ElementKind::exact && !format.stochastic, [&] {
    return "feedback.format: expected a lossy format that rounds to nearest, got " + format.to_string();
  });
  check_aligned("feedback.residual", feedback->residual, kWireAlignment);
  check_argument(feedback->decay >= 0.0f && feedback->decay <= 1.0f,
                 [&] { return "feedback.decay: expected 0 to 1, got " + exact_digits(feedback->decay); });
}

template <class Views>
void check_slots(const Views& slots, int size) {
  check_argument(slots.size() == static_cast<std::size_t>(size), [&] {
    return "slots: expected one for each of " + std::to_string(size) + " ranks, got " + std::to_string(slots.size());
  });
}

template <class Views>
void check_slots(const Views& slots, int size, int rank, std::int64_t own_elements, DType dtype, const char* own_name) {
  check_slots(slots, size);
  for (const auto& slot : slots) {
    check_argument(slot.dtype == dtype, [&] {
      return "slots: expected dtype " + std::string(to_string(dtype)) + " as in `" + own_name + "`, got " +
             std::string(to_string(slot.dtype));
    });
  }
  const std::int64_t slot_elements = slots[static_cast<std::size_t>(rank)].num_elements;
  check_argument(slot_elements == own_elements, [&] {
    return std::string(own_name) + ": expected the " + std::to_string(slot_elements) + " elements of slot " +
           std::to_string(rank) + ", got " + std::to_string(own_elements);
  });
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
                           std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes)
    : workspace_(std::move(workspace)),
      codec_(std::move(codec)),
      transport_(std::move(transport)),
      topology_(std::move(topology)),
      peers_(topology_.peers(transport_->rank())),
      node_peers_(topology_.node_peers(transport_->rank())),
      others_(topology_.others(transport_->rank())),
      chunk_bytes_(chunk_bytes) {
  check_argument(topology_.size() == transport_->size(), [&] {
    return "topology: expected " + std::to_string(transport_->size()) + " ranks, got " +
           std::to_string(topology_.size());
  });
  check_argument(chunk_bytes > 0, [] { return std::string("chunk_bytes: expected at least 1, got 0"); });
}

template <class Body>
CallStats Communicator::run(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                            StreamView stream, Body&& body) {
  CallStats stats;
  const std::uint64_t seed = seed_of_call(seed_, ++num_calls_);
  try {
    transport_->begin(call, peers, timeout);
    body(Resources{*codec_, *transport_, topology_, *workspace_, stream, stats, seed});
  } catch (const std::exception& error) {
    // Peers wait for bytes that will not come.
    transport_->abort("in " + call + ": " + error.what());
    throw;
  }
  return stats;
}

DeviceGathers& Communicator::device_gathers() {
  if (device_gathers_ == nullptr) device_gathers_ = make_device_gathers();
  return *device_gathers_;
}

template <class Plan>
void Communicator::check_plan(const Plan& plan, const SlotShape& slots) const {
  check_argument(plan.rank() == rank() && plan.topology() == topology_, [&] {
    return "plan: expected one of rank " + std::to_string(rank()) + " in " + topology_.to_string() + ", got rank " +
           std::to_string(plan.rank()) + " in " + plan.topology().to_string();
  });
  check_argument(plan.chunk_bytes() == chunk_bytes_, [&] {
    return "plan: expected one with a chunk_bytes of " + std::to_string(chunk_bytes_) + ", got " +
           std::to_string(plan.chunk_bytes());
  });
  check_argument(plan.slots() == slots, [&] {
    return "plan: expected one of slots " + slots.to_string() + ", got " + plan.slots().to_string();
  });
}

CallStats Communicator::all_gather(const GatherPlan& plan, ConstTensorView shard, std::span<const TensorView> slots,
                                   std::chrono::milliseconds timeout, StreamView stream, GatherExtras extras) {
  check_slots(slots, size(), rank(), shard.num_elements, shard.dtype, "shard");
  check_plan(plan, shape_of(slots));
  check_argument(extras.secondary == nullptr || extras.reference == nullptr,
                 [] { return std::string("reference: expected it or a secondary shard, got both"); });
  const std::byte* const end = shard.data + shard.num_bytes();
  check_argument(
      extras.reference == nullptr || extras.reference >= end || extras.reference + shard.num_bytes() <= shard.data,
      [] { return std::string("reference: expected memory of its own, got memory of the shard"); });
  const char* what = extras.secondary != nullptr   ? " keeping secondary shards"
                     : extras.reference != nullptr ? " of differences"
                                                   : "";
  return run("all_gather " + plan.description() + what, plan.topology().is_made_flat() ? others_ : peers_, timeout,
             stream, [&](const Resources& resources) { zcomm::all_gather(resources, plan, shard, slots, extras); });
}

CallStats Communicator::all_gather(ConstTensorView shard, std::span<const TensorView> slots, GatherSegments segments,
                                   std::chrono::milliseconds timeout, StreamView stream, GatherExtras extras) {
  check_slots(slots, size(), rank(), shard.num_elements, shard.dtype, "shard");
  return all_gather(plan_all_gather(shape_of(slots), segments), shard, slots, timeout, stream, extras);
}

CallStats Communicator::all_gather(ConstTensorView shard, std::span<const TensorView> slots, BlockFormat format,
                                   std::chrono::milliseconds timeout, StreamView stream, GatherExtras extras) {
  const Segment<BlockFormat> whole{longest(slots), format};
  return all_gather(shard, slots, {&whole, 1}, timeout, stream, extras);
}

CallStats Communicator::gather_secondary(const GatherPlan& plan, const std::byte* secondary,
                                         std::span<const TensorView> slots, std::chrono::milliseconds timeout,
                                         StreamView stream) {
  check_slots(slots, size());
  const TensorView& own = slots[static_cast<std::size_t>(rank())];
  check_slots(slots, size(), rank(), own.num_elements, own.dtype, "slots");
  check_plan(plan, shape_of(slots));
  return run("gather_secondary " + plan.description(), node_peers_, timeout, stream,
             [&](const Resources& resources) { zcomm::gather_secondary(resources, plan, secondary, slots); });
}

void Communicator::check_difference(const DifferencePlan& plan, const KeptShards& kept, StreamView stream) const {
  check_argument(is_on_device() || codec_->differences() != nullptr,
                 [] { return std::string("codec: expected one of lossless differences, got one without"); });
  check_argument(kept.values.size() == plan.kept_bytes(), [&] {
    return "kept: expected " + std::to_string(plan.kept_bytes()) + " bytes, got " + std::to_string(kept.values.size());
  });
  check_aligned("kept", kept.values.data(), kWireAlignment);
  check_argument(!is_on_device() || !is_capturing(stream), [] {
    return std::string(
        "stream: expected one that runs, got one that records a CUDA graph: the sizes of differences change, and a "
        "graph's do not");
  });
}

CallStats Communicator::all_gather(const DifferencePlan& plan, ConstTensorView shard, std::span<const TensorView> slots,
                                   KeptShards& kept, std::chrono::milliseconds timeout, StreamView stream) {
  check_slots(slots, size(), rank(), shard.num_elements, shard.dtype, "shard");
  check_plan(plan, shape_of(slots));
  check_difference(plan, kept, stream);
  return run("all_gather " + plan.description() + " to generation " + std::to_string(kept.generation), peers_, timeout,
             stream, [&](const Resources& resources) {
               if (is_on_device()) {
                 device_gathers().all_gather(resources, {plan, shard, kept}, slots);
               } else {
                 zcomm::all_gather(resources, plan, shard, slots, kept);
               }
             });
}

CallStats Communicator::gather_secondary(const DifferencePlan& plan, const KeptShards& kept,
                                         std::span<const TensorView> slots, std::chrono::milliseconds timeout,
                                         StreamView stream) {
  check_slots(slots, size());
  const TensorView& own = slots[static_cast<std::size_t>(rank())];
  check_slots(slots, size(), rank(), own.num_elements, own.dtype, "slots");
  check_plan(plan, shape_of(slots));
  check_difference(plan, kept, stream);
  check_argument(kept.generation > 0, [] {
    return std::string("kept: expected shards that an all_gather by differences has filled, got those of generation 0");
  });
  check_argument(!is_on_device() || !device_gathers().is_prepared(kept), [] {
    return std::string("kept: expected shards that were gathered, got those of a gather that is only prepared");
  });
  return run("gather_secondary " + plan.description() + " of generation " + std::to_string(kept.generation),
             node_peers_, timeout, stream, [&](const Resources& resources) {
               if (is_on_device()) {
                 device_gathers().gather_secondary(resources, plan, kept, slots);
               } else {
                 zcomm::gather_secondary(resources, plan, kept, slots);
               }
             });
}

CallStats Communicator::prepare_differences(std::span<const ShardDifference> shards, std::chrono::milliseconds timeout,
                                            StreamView stream) {
  check_argument(is_on_device(), [] {
    return std::string("codec: expected that of a GPU, got one of host memory: there sizes are sent with each gather");
  });
  check_argument(!shards.empty(), [] { return std::string("shards: expected at least one, got none"); });
  for (const ShardDifference& each : shards) {
    const std::int64_t length = each.plan.slots().lengths[static_cast<std::size_t>(rank())];
    check_argument(each.shard.num_elements == length && each.shard.dtype == each.plan.slots().dtype, [&] {
      return "shards: expected " + std::to_string(length) + " elements of " +
             std::string(to_string(each.plan.slots().dtype)) + ", as was planned, got " +
             std::to_string(each.shard.num_elements) + " of " + std::string(to_string(each.shard.dtype));
    });
    check_plan(each.plan, each.plan.slots());
    check_difference(each.plan, each.kept, stream);
    const auto same = [&](const ShardDifference& other) { return &other.kept == &each.kept; };
    check_argument(std::count_if(shards.begin(), shards.end(), same) == 1,
                   [] { return std::string("shards: expected each with a `kept` of its own, got one twice"); });
  }
  return run("prepare " + std::to_string(shards.size()) + " gathers, the first of " +
                 shards.front().plan.description() + " to generation " + std::to_string(shards.front().kept.generation),
             peers_, timeout, stream, [&](const Resources& resources) { device_gathers().prepare(resources, shards); });
}

CallStats Communicator::gather_secondary(const std::byte* secondary, std::span<const TensorView> slots,
                                         GatherSegments segments, std::chrono::milliseconds timeout,
                                         StreamView stream) {
  check_slots(slots, size());
  return gather_secondary(plan_all_gather(shape_of(slots), segments), secondary, slots, timeout, stream);
}

CallStats Communicator::reduce_scatter(const ReducePlan& plan, std::span<const ConstTensorView> slots,
                                       TensorView output, float factor, std::chrono::milliseconds timeout,
                                       StreamView stream, const Feedback* feedback) {
  check_slots(slots, size(), rank(), output.num_elements, output.dtype, "output");
  check_plan(plan, shape_of(slots));
  check_feedback(feedback, plan.feedback());
  return run("reduce_scatter " + plan.description() + " times " + exact_digits(factor) + describe(feedback),
             plan.is_direct() ? others_ : peers_, timeout, stream, [&](const Resources& resources) {
               // Gradients wait for the optimizer. A small output may stay in a cache until then.
               const bool read_late = output.num_bytes() >= std::size_t{1} << 20;
               zcomm::reduce_scatter(resources, {plan, slots, output, factor, feedback, read_late});
             });
}

CallStats Communicator::reduce_scatter(std::span<const ConstTensorView> slots, TensorView output,
                                       ReduceSegments segments, float factor, std::chrono::milliseconds timeout,
                                       StreamView stream, const Feedback* feedback) {
  check_slots(slots, size(), rank(), output.num_elements, output.dtype, "output");
  const ReducePlan plan = plan_reduce_scatter(shape_of(slots), segments, format_of(feedback));
  return reduce_scatter(plan, slots, output, factor, timeout, stream, feedback);
}

CallStats Communicator::reduce_scatter(std::span<const ConstTensorView> slots, TensorView output, HopFormats formats,
                                       float factor, std::chrono::milliseconds timeout, StreamView stream) {
  const Segment<HopFormats> whole{longest(slots), formats};
  return reduce_scatter(slots, output, {&whole, 1}, factor, timeout, stream);
}

CallStats Communicator::all_reduce(const AllReducePlan& plan, TensorView tensor, float factor,
                                   std::chrono::milliseconds timeout, StreamView stream, const Feedback* feedback) {
  check_argument(plan.num_elements() == tensor.num_elements, [&] {
    return "plan: expected one of the tensor's " + std::to_string(tensor.num_elements) + " elements, got " +
           std::to_string(plan.num_elements());
  });
  check_plan(plan.reduce(), {plan.reduce().slots().lengths, tensor.dtype});
  check_feedback(feedback, plan.reduce().feedback());
  return run("all_reduce " + plan.description() + " times " + exact_digits(factor) + describe(feedback), peers_,
             timeout, stream,
             [&](const Resources& resources) { zcomm::all_reduce(resources, plan, tensor, factor, feedback); });
}

CallStats Communicator::all_reduce(TensorView tensor, HopFormats formats, float factor,
                                   std::chrono::milliseconds timeout, StreamView stream, const Feedback* feedback) {
  const AllReducePlan plan = plan_all_reduce(tensor.num_elements, tensor.dtype, formats, format_of(feedback));
  return all_reduce(plan, tensor, factor, timeout, stream, feedback);
}

void Communicator::round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream) const {
  check_argument(decoded.num_elements == values.num_elements, [&] {
    return "decoded: expected the " + std::to_string(values.num_elements) + " elements of `values`, got " +
           std::to_string(decoded.num_elements);
  });
  const Scratch wire(*workspace_, WireLayout(format, values.dtype, values.num_elements).num_bytes, stream);
  const Encode encode{values, format, wire.data(), {}};
  codec_->encode({&encode, 1}, stream);
  const Decode decode{{wire.data(), format, values.dtype}, decoded};
  codec_->decode({&decode, 1}, stream);
}

}  // namespace zcomm
