#include "planned_calls.hpp"

#include <algorithm>

#include "reduce_op.hpp"
#include "tensors.hpp"

namespace zcomm::c10d_binding {
namespace {

bool is_all_exact(const Parts& parts) {
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.second; });
}

template <class Format>
std::vector<Segment<Format>> segments_of(const Parts& parts, std::int64_t num_elements, Format format) {
  if (parts.empty()) return {{num_elements, format}};
  std::vector<Segment<Format>> segments;
  bool after_exact = false;
  for (const auto& [count, exact] : parts) {
    if (exact && after_exact) {
      segments.back().num_elements += count;
    } else {
      segments.push_back({count, exact ? Format{} : format});
    }
    after_exact = exact;
  }
  return segments;
}

void check_memory(const at::Tensor& memory, const char* name, std::size_t num_bytes, at::Device device) {
  TORCH_CHECK_VALUE(memory.scalar_type() == at::kByte && memory.is_contiguous() && memory.device() == device &&
                        memory.nbytes() == num_bytes,
                    "zcomm: ", name, ": expected ", num_bytes, " contiguous Byte on ", device, ", got ", memory.numel(),
                    memory.is_contiguous() ? " contiguous " : " ", memory.scalar_type(), " on ", memory.device());
}

// The feedback of `call`, whose plan has its format.
ReduceCall with_residual(ReduceCall call, const std::optional<HeldResidual>& residual, std::size_t num_bytes,
                         const std::optional<BlockFormat>& format, at::Device device) {
  TORCH_CHECK_VALUE(residual.has_value() == format.has_value(), "zcomm: residual: expected ", format ? "one" : "none",
                    ", as was planned, got ", residual ? "one" : "none");
  if (!residual) return call;
  check_memory(residual->data, "residual", num_bytes, device);
  call.residual = residual->data;
  call.feedback =
      Feedback{static_cast<std::byte*>(residual->data.data_ptr()), *format, residual->decay, residual->empty};
  return call;
}

}  // namespace

Policy PlannedCalls::policy_of(const PolicyOverride* formats) const {
  return effective_policy(formats != nullptr ? formats->apply(options_->policy) : options_->policy);
}

template <class P, class Format>
bool PlannedCalls::is_planned(const std::shared_ptr<P>& kept, const Format& format, const at::Tensor& whole,
                              const Parts& parts) {
  return kept && kept->calls == this && !kept->group.expired() && kept->format == format &&
         kept->device == whole.device().type() && kept->dtype == whole.scalar_type() &&
         kept->num_elements == whole.numel() && kept->parts == parts;
}

template <class P, class Format, class Plan>
std::shared_ptr<P> PlannedCalls::planned(const Format& format, const at::Tensor& whole, const Parts& parts,
                                         std::shared_ptr<const Plan> plan) {
  c10::weak_intrusive_ptr<::c10d::Backend> group(
      c10::intrusive_ptr<::c10d::Backend>::unsafe_reclaim_from_nonowning(&group_));
  return std::make_shared<P>(P{std::move(group), this, format, whole.device().type(), whole.scalar_type(),
                               whole.numel(), parts, std::move(plan)});
}

template <class P>
void PlannedCalls::check_planned(const P& planned, const at::Tensor& whole) const {
  TORCH_CHECK_VALUE(whole.scalar_type() == planned.dtype && whole.numel() == planned.num_elements,
                    "zcomm: expected a tensor of ", planned.num_elements, " ", planned.dtype, ", as was planned, got ",
                    whole.numel(), " ", whole.scalar_type());
}

std::shared_ptr<PlannedGather> PlannedCalls::plan_gather(const at::Tensor& output, const at::Tensor& input,
                                                         const PolicyOverride* formats, const Parts& parts, bool again,
                                                         const std::shared_ptr<PlannedGather>& kept) {
  const Policy policy = policy_of(formats);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, group_.getRank());
  call.again = again;
  if (compressed_.decide(policy, call) != Verdict::compressed || is_all_exact(parts)) return nullptr;
  if (is_planned(kept, policy.all_gather, output, parts)) return kept;
  check_shapes(output, input, group_.getSize(), "output", "input");
  return planned<PlannedGather>(
      policy.all_gather, output, parts,
      compressed_.plan_gather(input.device().type(), shape_of(slots_of(output, group_.getSize())),
                              segments_of(parts, input.numel(), policy.all_gather),
                              compressed_.is_one_hop(policy, call)));
}

std::shared_ptr<PlannedDifferences> PlannedCalls::plan_differences(const at::Tensor& output, const at::Tensor& input,
                                                                   const std::shared_ptr<PlannedDifferences>& kept) {
  if (is_planned(kept, BlockFormat{}, output, {})) return kept;
  TORCH_CHECK_VALUE(output.scalar_type() == at::kBFloat16 || output.scalar_type() == at::kHalf,
                    "zcomm: output: expected BFloat16 or Half, of which differences are made, got ",
                    output.scalar_type());
  check_shapes(output, input, group_.getSize(), "output", "input");
  return planned<PlannedDifferences>(
      BlockFormat{}, output, {},
      compressed_.plan_differences(output.device().type(), shape_of(slots_of(output, group_.getSize()))));
}

std::shared_ptr<PlannedReduce> PlannedCalls::plan_reduce(const at::Tensor& output, const at::Tensor& input,
                                                         const ::c10d::ReduceOp& op, const PolicyOverride* formats,
                                                         const Parts& parts, const std::optional<BlockFormat>& feedback,
                                                         const std::shared_ptr<PlannedReduce>& kept) {
  const Policy policy = policy_of(formats);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, op);
  if (compressed_.decide(policy, call) != Verdict::compressed || is_all_exact(parts)) return nullptr;
  if (is_planned(kept, policy.reduce_scatter, input, parts) && kept->plan->feedback() == feedback) return kept;
  check_shapes(input, output, group_.getSize(), "input", "output");
  return planned<PlannedReduce>(
      policy.reduce_scatter, input, parts,
      compressed_.plan_reduce(input.device().type(), shape_of(slots_of(input, group_.getSize())),
                              segments_of(parts, output.numel(), policy.reduce_scatter), feedback));
}

std::shared_ptr<PlannedAllReduce> PlannedCalls::plan_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                                                const PolicyOverride* formats,
                                                                const std::optional<BlockFormat>& feedback,
                                                                const std::shared_ptr<PlannedAllReduce>& kept) {
  const Policy policy = policy_of(formats);
  const Call call = describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op);
  if (compressed_.decide(policy, call) != Verdict::compressed) return nullptr;
  if (is_planned(kept, policy.all_reduce, tensor, {}) && kept->plan->reduce().feedback() == feedback) return kept;
  return planned<PlannedAllReduce>(
      policy.all_reduce, tensor, {},
      compressed_.plan_all_reduce(tensor.device().type(), view_of(tensor), policy.all_reduce, feedback));
}

WorkPtr PlannedCalls::gather(const PlannedGather& planned, const at::Tensor& output, const at::Tensor& input,
                             const std::optional<at::Tensor>& secondary, const std::optional<at::Tensor>& reference,
                             const SitePtr& site, bool async) {
  check_planned(planned, output);
  check_shapes(output, input, group_.getSize(), "output", "input");
  GatherCall call{planned.plan, {}, {}, site};
  if (secondary) {
    check_memory(*secondary, "secondary", planned.plan->secondary_bytes(), output.device());
    call.secondary = *secondary;
  }
  if (reference) {
    check_shapes(output, *reference, group_.getSize(), "output", "reference");
    call.reference = *reference;
  }
  compressed_.count(describe(Collective::all_gather, Form::single, input, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.all_gather(::c10d::OpType::_ALLGATHER_BASE, input, slots_of(output, group_.getSize()),
                                             {output}, settings(async), std::move(call)));
}

WorkPtr PlannedCalls::gather_secondary(const PlannedGather& planned, const at::Tensor& output,
                                       const at::Tensor& secondary, const SitePtr& site, bool async) {
  check_planned(planned, output);
  check_memory(secondary, "secondary", planned.plan->secondary_bytes(), output.device());
  compressed_.count(describe(Collective::all_gather, Form::single, output, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.gather_secondary(secondary, slots_of(output, group_.getSize()), output,
                                                   settings(async), {planned.plan, {}, {}, site}));
}

WorkPtr PlannedCalls::gather_differences(const PlannedDifferences& planned, const at::Tensor& output,
                                         const at::Tensor& input, const HeldShardsPtr& held, const SitePtr& site,
                                         bool async) {
  check_planned(planned, output);
  check_shapes(output, input, group_.getSize(), "output", "input");
  check_memory(held->data, "held", planned.plan->kept_bytes(), output.device());
  compressed_.count(describe(Collective::all_gather, Form::single, input, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.gather_differences(input, slots_of(output, group_.getSize()), output, settings(async),
                                                     {planned.plan, held, site}));
}

WorkPtr PlannedCalls::gather_held(const PlannedDifferences& planned, const at::Tensor& output,
                                  const HeldShardsPtr& held, const SitePtr& site, bool async) {
  check_planned(planned, output);
  check_memory(held->data, "held", planned.plan->kept_bytes(), output.device());
  compressed_.count(describe(Collective::all_gather, Form::single, output, {&output, 1}), Verdict::compressed);
  return inner_.track(compressed_.gather_differences({}, slots_of(output, group_.getSize()), output, settings(async),
                                                     {planned.plan, held, site}));
}

WorkPtr PlannedCalls::prepare_differences(const std::vector<ToPrepare>& gathers, bool async) {
  TORCH_CHECK_VALUE(!gathers.empty(), "zcomm: gathers: expected at least one, got none");
  std::vector<DifferenceShard> shards;
  for (const auto& [planned, input, held, site] : gathers) {
    TORCH_CHECK_VALUE(planned && planned->calls == this, "zcomm: gathers: expected plans of this group, got another's");
    TORCH_CHECK_VALUE(held && !input.is_cpu(),
                      "zcomm: gathers: expected tensors on a GPU, got one on cpu: there sizes ",
                      "are sent with each gather");
    check_memory(held->data, "held", planned->plan->kept_bytes(), input.device());
    const std::int64_t num_elements = planned->num_elements / group_.getSize();
    TORCH_CHECK_VALUE(input.is_contiguous() && input.scalar_type() == planned->dtype && input.numel() == num_elements,
                      "zcomm: gathers: expected ", num_elements, " contiguous ", planned->dtype,
                      ", as was planned, got ", input.numel(), input.is_contiguous() ? " contiguous " : " ",
                      input.scalar_type());
    shards.push_back({input, {planned->plan, held, site}});
  }
  return inner_.track(compressed_.prepare_differences(shards, settings(async)));
}

WorkPtr PlannedCalls::reduce(const PlannedReduce& planned, const at::Tensor& output, const at::Tensor& input,
                             const ::c10d::ReduceOp& op, const std::optional<HeldResidual>& residual,
                             const SitePtr& site, bool async) {
  check_planned(planned, input);
  check_shapes(input, output, group_.getSize(), "input", "output");
  const ReducePlan& plan = *planned.plan;
  ReduceCall call =
      with_residual({planned.plan, {}, {}, {}, site}, residual, plan.residual_bytes(), plan.feedback(), input.device());
  compressed_.count(describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, op), Verdict::compressed);
  return inner_.track(compressed_.reduce_scatter(::c10d::OpType::_REDUCE_SCATTER_BASE, output,
                                                 slots_of(input, group_.getSize()), {input}, op, settings(async),
                                                 std::move(call)));
}

WorkPtr PlannedCalls::all_reduce(const PlannedAllReduce& planned, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                 const std::optional<HeldResidual>& residual, bool async) {
  check_planned(planned, tensor);
  const AllReducePlan& plan = *planned.plan;
  ReduceCall call = with_residual({{}, planned.plan, {}, {}, {}}, residual, plan.residual_bytes(),
                                  plan.reduce().feedback(), tensor.device());
  compressed_.count(describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op), Verdict::compressed);
  return inner_.track(compressed_.all_reduce(::c10d::OpType::ALLREDUCE, tensor, op, settings(async), std::move(call)));
}

}  // namespace zcomm::c10d_binding
