// Collectives whose caller knows what its tensors hold: parts that travel in formats of their own, gathers that keep
// their wires inside the node (hpZ of ZeRO++, arXiv 2306.10209), and calls that are counted by themselves. Who gathers
// from secondary shards knows that the values have not changed since they were kept, on any rank.
#include "process_group.hpp"
#include "tensors.hpp"

namespace zcomm::c10d_binding {
namespace {

std::vector<TensorView> gathered_slots(const at::Tensor& output, int size) {
  TORCH_CHECK_VALUE(dtype_of(output).has_value(), "zcomm: output has dtype ", output.scalar_type(),
                    ", need Float, BFloat16 or Half");
  return slots_of(output, size);
}

}  // namespace

std::string ProcessGroup::gather_format(const at::Tensor& output, const at::Tensor& input, const std::string& format) {
  Policy policy = options_->policy;
  if (!format.empty()) policy.all_gather = BlockFormat::parse(format);
  policy = effective_policy(policy);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  return compressed_.decide(policy, call) == Verdict::compressed ? policy.all_gather.to_string() : "exact";
}

std::string ProcessGroup::reduce_format(const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op,
                                        const std::string& formats) {
  Policy policy = options_->policy;
  if (!formats.empty()) policy.reduce_scatter = HopFormats::parse(formats);
  policy = effective_policy(policy);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, op);
  return compressed_.decide(policy, call) == Verdict::compressed ? policy.reduce_scatter.to_string() : "exact";
}

std::size_t ProcessGroup::secondary_bytes_of(int rank, const at::Tensor& output, GatherSegments segments) {
  handshake_.topology();
  return zcomm::secondary_bytes(handshake_.topology(), rank, options_->chunk_bytes, gathered_slots(output, getSize()),
                                segments);
}

std::pair<std::size_t, std::size_t> ProcessGroup::secondary_bytes(const at::Tensor& output,
                                                                  const NamedSegments& segments) {
  handshake_.topology();
  const auto parsed = parse_segments<BlockFormat>(segments);
  // A node's ranks take turns with the slots: the first rank of the smallest node keeps the most.
  int smallest = 0;
  for (int node = 1; node < handshake_.topology().num_nodes(); ++node) {
    if (handshake_.topology().ranks(node).size() < handshake_.topology().ranks(smallest).size()) smallest = node;
  }
  return {secondary_bytes_of(getRank(), output, parsed),
          secondary_bytes_of(handshake_.topology().ranks(smallest).front(), output, parsed)};
}

void ProcessGroup::check_secondary(const at::Tensor& secondary, const at::Tensor& output, GatherSegments segments) {
  const std::size_t num_bytes = secondary_bytes_of(getRank(), output, segments);
  TORCH_CHECK_VALUE(secondary.scalar_type() == at::kByte && secondary.is_contiguous() &&
                        secondary.device() == output.device() && secondary.nbytes() == num_bytes,
                    "zcomm: secondary is ", secondary.numel(), " ", secondary.scalar_type(), " on ", secondary.device(),
                    ", need ", num_bytes, " Byte on ", output.device(), ", contiguous");
}

WorkPtr ProcessGroup::all_gather_segments(at::Tensor output, at::Tensor input, const NamedSegments& segments,
                                          const std::optional<at::Tensor>& secondary,
                                          const std::optional<at::Tensor>& reference, const SitePtr& site, bool async) {
  GatherCall call{parse_segments<BlockFormat>(segments), {}, {}, site};
  check_shapes(output, input, getSize(), "output", "input");
  if (secondary) {
    check_secondary(*secondary, output, call.segments);
    call.secondary = *secondary;
  }
  if (reference) {
    check_shapes(output, *reference, getSize(), "output", "reference");
    call.reference = *reference;
  }
  compressed_.count(describe(Collective::all_gather, Form::single, input, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.all_gather(::c10d::OpType::_ALLGATHER_BASE, input, gathered_slots(output, getSize()),
                                             {output}, {options_->policy, options_->timeout, async}, std::move(call)));
}

WorkPtr ProcessGroup::gather_secondary(at::Tensor output, at::Tensor secondary, const NamedSegments& segments,
                                       const SitePtr& site, bool async) {
  auto parsed = parse_segments<BlockFormat>(segments);
  check_secondary(secondary, output, parsed);
  compressed_.count(describe(Collective::all_gather, Form::single, output, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.gather_secondary(secondary, gathered_slots(output, getSize()), output,
                                                   {options_->policy, options_->timeout, async},
                                                   {std::move(parsed), {}, {}, site}));
}

std::size_t ProcessGroup::feedback_bytes(const at::Tensor& input, const NamedSegments& segments,
                                         const std::string& format) {
  handshake_.topology();
  const std::vector<TensorView> slots = gathered_slots(input, getSize());
  return zcomm::feedback_bytes(handshake_.topology(), getRank(), options_->chunk_bytes,
                               std::vector<ConstTensorView>(slots.begin(), slots.end()),
                               parse_segments<HopFormats>(segments), BlockFormat::parse(format));
}

std::size_t ProcessGroup::all_reduce_feedback_bytes(const at::Tensor& tensor, const std::string& formats,
                                                    const std::string& format) {
  handshake_.topology();
  const HopFormats parsed = HopFormats::parse(formats);
  const std::vector<TensorView> slots = all_reduce_slots(gathered_slots(tensor, 1)[0], getSize(), parsed);
  const Segment<HopFormats> segment{slots[0].num_elements, parsed};
  return zcomm::feedback_bytes(handshake_.topology(), getRank(), options_->chunk_bytes,
                               std::vector<ConstTensorView>(slots.begin(), slots.end()), {&segment, 1},
                               BlockFormat::parse(format));
}

ReduceCall ProcessGroup::with_feedback(const NamedFeedback& feedback, std::size_t num_bytes, const at::Tensor& like) {
  const auto& [residual, format, decay, empty] = feedback;
  TORCH_CHECK_VALUE(residual.scalar_type() == at::kByte && residual.is_contiguous() &&
                        residual.device() == like.device() && residual.nbytes() == num_bytes,
                    "zcomm: residual is ", residual.numel(), " ", residual.scalar_type(), " on ", residual.device(),
                    ", need ", num_bytes, " Byte on ", like.device(), ", contiguous");
  return {{},
          Feedback{static_cast<std::byte*>(residual.data_ptr()), BlockFormat::parse(format), decay, empty},
          residual,
          {}};
}

WorkPtr ProcessGroup::reduce_scatter_segments(at::Tensor output, at::Tensor input, const ::c10d::ReduceOp& op,
                                              const NamedSegments& segments,
                                              const std::optional<NamedFeedback>& feedback, const SitePtr& site,
                                              bool async) {
  check_shapes(input, output, getSize(), "input", "output");
  ReduceCall call;
  if (feedback) call = with_feedback(*feedback, feedback_bytes(input, segments, std::get<1>(*feedback)), input);
  call.segments = parse_segments<HopFormats>(segments);
  call.site = site;
  compressed_.count(describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, op), Verdict::compressed);
  return inner_.track(compressed_.reduce_scatter(::c10d::OpType::_REDUCE_SCATTER_BASE, output,
                                                 gathered_slots(input, getSize()), {input}, op,
                                                 {options_->policy, options_->timeout, async}, std::move(call)));
}

std::string ProcessGroup::all_reduce_format(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                            const std::string& formats) {
  Policy policy = options_->policy;
  policy.all_reduce = HopFormats::parse(formats);
  policy = effective_policy(policy);
  const Call call = describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op);
  return compressed_.decide(policy, call) == Verdict::compressed ? policy.all_reduce.to_string() : "exact";
}

WorkPtr ProcessGroup::all_reduce_feedback(at::Tensor tensor, const ::c10d::ReduceOp& op, const std::string& formats,
                                          const NamedFeedback& feedback, bool async) {
  CallSettings settings{options_->policy, options_->timeout, async};
  settings.policy.all_reduce = HopFormats::parse(formats);
  const std::size_t num_bytes = all_reduce_feedback_bytes(tensor, formats, std::get<1>(feedback));
  ReduceCall call = with_feedback(feedback, num_bytes, tensor);
  compressed_.count(describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op), Verdict::compressed);
  return inner_.track(compressed_.all_reduce(::c10d::OpType::ALLREDUCE, tensor, op, settings, std::move(call)));
}

}  // namespace zcomm::c10d_binding
