#include "operations.hpp"

#include <algorithm>

#include "reduce_op.hpp"
#include "tensors.hpp"
#include "zcomm/error.hpp"

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

void check_planned(const PlannedOperation& planned, const at::Tensor& whole, const char* name) {
  TORCH_CHECK_VALUE(whole.scalar_type() == planned.dtype && whole.numel() == planned.num_elements &&
                        whole.device().type() == planned.device,
                    "zcomm: ", name, ": expected a tensor of ", planned.num_elements, " ", planned.dtype, " on ",
                    planned.device, ", as was planned, got ", whole.numel(), " ", whole.scalar_type(), " on ",
                    whole.device());
  check_contiguous(whole, name, whole.device());
}

// Adds the feedback to the job, whose operation has its format.
void add_residual(Job& job, const std::optional<HeldResidual>& residual, const std::optional<BlockFormat>& format) {
  TORCH_CHECK_VALUE(residual.has_value() == format.has_value(), "zcomm: residual: expected ", format ? "one" : "none",
                    ", as was planned, got ", residual ? "one" : "none");
  if (!residual) return;
  check_memory(residual->data, "residual", job.operation->residual_bytes(), job.outputs[0].device());
  job.inputs.push_back(residual->data);
  job.feedback =
      Feedback{static_cast<std::byte*>(residual->data.data_ptr()), *format, residual->decay, residual->empty};
}

}  // namespace

Policy Operations::policy_of(const PolicyOverride* formats) const {
  return effective_policy(formats != nullptr ? formats->apply(options_->policy) : options_->policy);
}

bool Operations::is_planned(const PlannedPtr& like, Collective collective, HopFormats format, const at::Tensor& whole,
                            const Parts& parts, const std::optional<BlockFormat>& feedback) const {
  return like && like->owner == this && !like->group.expired() && like->collective == collective &&
         like->format == format && like->device == whole.device().type() && like->dtype == whole.scalar_type() &&
         like->num_elements == whole.numel() && like->parts == parts && like->feedback == feedback;
}

PlannedPtr Operations::planned(Collective collective, HopFormats format, const at::Tensor& whole, const Parts& parts,
                               const std::optional<BlockFormat>& feedback, OperationPtr operation) {
  c10::weak_intrusive_ptr<::c10d::Backend> group(
      c10::intrusive_ptr<::c10d::Backend>::unsafe_reclaim_from_nonowning(&group_));
  return std::make_shared<PlannedOperation>(PlannedOperation{std::move(group),
                                                             this,
                                                             collective,
                                                             format,
                                                             whole.device().type(),
                                                             whole.scalar_type(),
                                                             whole.numel(),
                                                             parts,
                                                             feedback,
                                                             compressed_.counted(std::move(operation)),
                                                             {}});
}

PlannedPtr Operations::plan_gather(const at::Tensor& output, const at::Tensor& input, const PolicyOverride* formats,
                                   const Parts& parts, bool again, const PlannedPtr& like) {
  Policy policy = policy_of(formats);
  policy.forms.in_place = true;  // FSDP2 gathers copies of its shards
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, group_.getRank());
  call.again = again;
  if (compressed_.decide(policy, call) != Verdict::compressed || is_all_exact(parts)) return nullptr;
  const BlockFormat format = policy.all_gather;
  if (is_planned(like, Collective::all_gather, {format, format}, output, parts, {})) return like;
  check_shapes(output, input, group_.getSize(), "output", "input");
  return planned(Collective::all_gather, {format, format}, output, parts, {},
                 make_all_gather(std::make_shared<const GatherPlan>(
                     compressed_.world(output.device().type()), shape_of(slots_of(output, group_.getSize())),
                     segments_of(parts, input.numel(), format), compressed_.is_one_hop(policy, call))));
}

PlannedPtr Operations::plan_lossless(const at::Tensor& output, const at::Tensor& input, const PlannedPtr& like) {
  if (is_planned(like, Collective::all_gather, {}, output, {}, {})) return like;
  TORCH_CHECK_VALUE(output.scalar_type() == at::kBFloat16 || output.scalar_type() == at::kHalf,
                    "zcomm: output: expected BFloat16 or Half, of which differences are made, got ",
                    output.scalar_type());
  check_shapes(output, input, group_.getSize(), "output", "input");
  return planned(Collective::all_gather, {}, output, {}, {},
                 make_lossless_gather(std::make_shared<const LosslessPlan>(
                     compressed_.world(output.device().type()), shape_of(slots_of(output, group_.getSize())))));
}

PlannedPtr Operations::plan_reduce(const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op,
                                   const PolicyOverride* formats, const Parts& parts,
                                   const std::optional<BlockFormat>& feedback, const PlannedPtr& like) {
  const Policy policy = policy_of(formats);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, op);
  if (compressed_.decide(policy, call) != Verdict::compressed || is_all_exact(parts)) return nullptr;
  const HopFormats format = policy.reduce_scatter;
  if (is_planned(like, Collective::reduce_scatter, format, input, parts, feedback)) return like;
  check_shapes(input, output, group_.getSize(), "input", "output");
  return planned(
      Collective::reduce_scatter, format, input, parts, feedback,
      make_reduce_scatter({compressed_.world(input.device().type()), shape_of(slots_of(input, group_.getSize())),
                           segments_of(parts, output.numel(), format), feedback}));
}

PlannedPtr Operations::plan_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                       const PolicyOverride* formats, const std::optional<BlockFormat>& feedback,
                                       const PlannedPtr& like) {
  const Policy policy = policy_of(formats);
  const Call call = describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op);
  if (compressed_.decide(policy, call) != Verdict::compressed) return nullptr;
  if (is_planned(like, Collective::all_reduce, policy.all_reduce, tensor, {}, feedback)) return like;
  return planned(Collective::all_reduce, policy.all_reduce, tensor, {}, feedback,
                 make_all_reduce({compressed_.world(tensor.device().type()), tensor.numel(), view_of(tensor).dtype,
                                  policy.all_reduce, feedback}));
}

JobPtr Operations::job_of(const PlannedOperation& planned, const at::Tensor& output,
                          const std::optional<at::Tensor>& input, const ::c10d::ReduceOp& op,
                          const CallSettings& settings) {
  const int size = group_.getSize();
  switch (planned.collective) {
    case Collective::all_gather:
      check_planned(planned, output, "output");
      TORCH_CHECK_VALUE(input || planned.kept, "zcomm: input: expected a tensor, as nothing is kept, got none");
      if (input) {
        check_shapes(output, *input, size, "output", "input");
        check_contiguous(*input, "input", output.device());
      }
      return compressed_.gather(::c10d::OpType::_ALLGATHER_BASE, input.value_or(at::Tensor()), {output}, settings,
                                planned.operation);
    case Collective::reduce_scatter:
      TORCH_CHECK_VALUE(input, "zcomm: input: expected a tensor, got none");
      check_planned(planned, *input, "input");
      check_shapes(*input, output, size, "input", "output");
      check_contiguous(output, "output", input->device());
      return compressed_.reduction(::c10d::OpType::_REDUCE_SCATTER_BASE, {*input}, output, op, settings,
                                   Route::compressed, planned.operation);
    case Collective::all_reduce:
      check_planned(planned, output, "tensor");
      return compressed_.all_reduction(::c10d::OpType::ALLREDUCE, output, op, settings, planned.operation);
    default:
      break;
  }
  throw ArgumentError("collective: unknown value");
}

WorkPtr Operations::run(const PlannedOperation& planned, const at::Tensor& output,
                        const std::optional<at::Tensor>& input, const std::optional<::c10d::ReduceOp>& op,
                        const std::optional<HeldResidual>& residual, const SitePtr& site, bool async) {
  const bool is_sum = planned.collective != Collective::all_gather;
  TORCH_CHECK_VALUE(op.has_value() == is_sum, "zcomm: op: expected ", is_sum ? "one" : "none", ", got ",
                    op ? "one" : "none");
  const CallSettings call_settings = settings(async);
  JobPtr job = job_of(planned, output, input, op.value_or(::c10d::ReduceOp::SUM), call_settings);
  add_residual(*job, residual, planned.feedback);
  if (planned.kept) {
    check_memory(planned.kept->data, "kept", planned.operation->kept_bytes(), output.device());
    job->inputs.push_back(planned.kept->data);
  }
  job->site = site;
  const bool is_reduce_scatter = planned.collective == Collective::reduce_scatter;
  const at::Tensor& shard = is_sum || !input ? output : *input;
  const at::Tensor& whole = is_reduce_scatter ? *input : output;
  compressed_.count(is_sum ? describe(planned.collective, Form::single, shard, {&whole, 1}, *op)
                           : describe(planned.collective, Form::single, shard, {&whole, 1}),
                    Verdict::compressed);
  return inner_.track(compressed_.launch(std::move(job), call_settings));
}

WorkPtr Operations::prepare(const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers, bool async) {
  TORCH_CHECK_VALUE(!gathers.empty(), "zcomm: gathers: expected at least one, got none");
  auto job = std::make_unique<Job>();
  job->collective = Collective::all_gather;
  job->type = ::c10d::OpType::_ALLGATHER_BASE;
  job->title = "zcomm:prepare_lossless";
  std::vector<OperationPtr> operations;
  for (const auto& [planned, input, site] : gathers) {
    TORCH_CHECK_VALUE(planned && planned->owner == this && planned->kept,
                      "zcomm: gathers: expected those of this group that keep values, got others");
    TORCH_CHECK_VALUE(!input.is_cpu(), "zcomm: gathers: expected tensors on a GPU, got one on cpu: there sizes ",
                      "are sent with each gather");
    check_memory(planned->kept->data, "kept", planned->operation->kept_bytes(), input.device());
    const std::int64_t num_elements = planned->num_elements / group_.getSize();
    TORCH_CHECK_VALUE(input.is_contiguous() && input.scalar_type() == planned->dtype && input.numel() == num_elements,
                      "zcomm: gathers: expected ", num_elements, " contiguous ", planned->dtype,
                      ", as was planned, got ", input.numel(), input.is_contiguous() ? " contiguous " : " ",
                      input.scalar_type());
    operations.push_back(planned->operation);
    job->read.push_back(view_of(input));
    job->inputs.push_back(input);
    job->outputs.push_back(planned->kept->data);
    job->shares.emplace_back(site, planned->operation->num_chunks());  // one header per chunk
  }
  job->operation = make_preparation(std::move(operations));
  return inner_.track(compressed_.launch(std::move(job), settings(async)));
}

}  // namespace zcomm::c10d_binding
