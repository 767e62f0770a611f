#include "operations.hpp"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "c10d/base/tensors.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

using Whole = std::vector<at::Tensor>;

Whole whole_of(TensorOrParts given) {
  if (auto* const parts = std::get_if<Whole>(&given)) return std::move(*parts);
  return {std::get<at::Tensor>(std::move(given))};
}

bool is_all_exact(const Parts& parts) {
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.second; });
}

template <class Format>
std::vector<Segment<Format>> segments_of(const Parts& parts, std::int64_t num_elements, Format format) {
  if (parts.empty()) return {{num_elements, format}};
  std::vector<Segment<Format>> segments;
  for (const auto& [count, exact] : parts) segments.push_back({count, exact ? Format{} : format});
  return segments;
}

// Checks that `whole` is one tensor, or one of the same dtype for each part.
void check_whole(const Whole& whole, const Parts& parts, int size, const char* name) {
  TORCH_CHECK_VALUE(!whole.empty() && (whole.size() == 1 || whole.size() == parts.size()), "zcomm: ", name,
                    ": expected one tensor, or one for each of ", parts.size(), " parts, got ", whole.size());
  for (std::size_t i = 0; i < whole.size() && whole.size() > 1; ++i) {
    TORCH_CHECK_VALUE(whole[i].numel() == size * parts[i].first && whole[i].scalar_type() == whole[0].scalar_type(),
                      "zcomm: ", name, ": expected ", size * parts[i].first, " ", whole[0].scalar_type(), " of part ",
                      i, ", got ", whole[i].numel(), " ", whole[i].scalar_type());
  }
}

SlotShape shape_of(const Whole& whole, int size) {
  const std::int64_t count = elements_of(whole) / size;
  return {std::vector<std::int64_t>(static_cast<std::size_t>(size), count), dtype_of(whole[0]).value()};
}

void check_memory(const at::Tensor& memory, const char* name, std::size_t num_bytes, at::Device device) {
  TORCH_CHECK_VALUE(memory.scalar_type() == at::kByte && memory.is_contiguous() && memory.device() == device &&
                        memory.nbytes() == num_bytes,
                    "zcomm: ", name, ": expected ", num_bytes, " contiguous Byte on ", device, ", got ", memory.numel(),
                    memory.is_contiguous() ? " contiguous " : " ", memory.scalar_type(), " on ", memory.device());
}

void check_planned(const PlannedOperation& planned, const Whole& whole, int size, const char* name) {
  check_whole(whole, planned.parts, size, name);
  const std::int64_t num_elements = elements_of(whole);
  const at::Device device = whole[0].device();
  TORCH_CHECK_VALUE(whole[0].scalar_type() == planned.dtype && num_elements == planned.num_elements &&
                        device.type() == planned.device,
                    "zcomm: ", name, ": expected a tensor of ", planned.num_elements, " ", planned.dtype, " on ",
                    planned.device, ", as was planned, got ", num_elements, " ", whole[0].scalar_type(), " on ",
                    device);
  for (const at::Tensor& tensor : whole) check_contiguous(tensor, name, device);
}

// Checks the input of a planned gather.
void check_gathered(const PlannedOperation& planned, const std::optional<Whole>& input, int size, at::Device device) {
  TORCH_CHECK_VALUE(input || planned.kept, "zcomm: input: expected a tensor, as nothing is kept, got none");
  if (!input) return;
  check_whole(*input, planned.parts, 1, "input");
  TORCH_CHECK_VALUE((*input)[0].scalar_type() == planned.dtype && elements_of(*input) * size == planned.num_elements,
                    "zcomm: input: expected ", planned.num_elements / size, " ", planned.dtype,
                    ", as was planned, got ", elements_of(*input), " ", (*input)[0].scalar_type());
  for (const at::Tensor& part : *input) check_contiguous(part, "input", device);
}

// Records the end of a decode of kept values. Events of a graph are of no use outside of it.
void note_decode(TensorKept& kept, at::Device device) {
  kept.decoded.reset();
  if (device.is_cpu() || is_capturing(current_view(device))) return;
  kept.decoded.emplace(device.type());
  kept.decoded->record(current_stream(device));
}

// Makes the current stream wait for that, before a call may overwrite the values.
void wait_for_decode(const TensorKept& kept, at::Device device) {
  if (kept.decoded && !is_capturing(current_view(device))) kept.decoded->block(current_stream(device));
}

// Adds the feedback to the job, whose operation has its format.
void add_residual(Job& job, const std::optional<Residual>& residual, const std::optional<BlockFormat>& format) {
  TORCH_CHECK_VALUE(residual.has_value() == format.has_value(), "zcomm: residual: expected ", format ? "one" : "none",
                    ", as was planned, got ", residual ? "one" : "none");
  if (!residual) return;
  const auto& [data, decay, is_empty] = *residual;
  check_memory(data, "residual", job.operation->residual_bytes(), job.outputs[0].device());
  job.inputs.push_back(data);
  job.feedback = Feedback{static_cast<std::byte*>(data.data_ptr()), *format, decay, is_empty};
}

Policy policy_of(ProcessGroup& group, const PolicyOverride* formats) {
  const Policy& policy = group.options()->policy;
  return effective_policy(formats != nullptr ? formats->apply(policy, nullptr) : policy);
}

// Returns `like` if it was planned so, else a plan of what `make` returns.
template <class Make>
PlannedPtr planned(ProcessGroup& group, const PlannedPtr& like, Collective collective, HopFormats format,
                   const Whole& whole, const Parts& parts, const std::optional<BlockFormat>& feedback, bool in_one_hop,
                   const Make& make) {
  const at::DeviceType device = whole[0].device().type();
  const at::ScalarType dtype = whole[0].scalar_type();
  const std::int64_t num_elements = elements_of(whole);
  if (like && like->group.lock().get() == &group && like->collective == collective && like->format == format &&
      like->device == device && like->dtype == dtype && like->num_elements == num_elements && like->parts == parts &&
      like->feedback == feedback && like->in_one_hop == in_one_hop)
    return like;
  OperationPtr operation = make();
  c10::weak_intrusive_ptr<ProcessGroup> owner(c10::intrusive_ptr<ProcessGroup>::unsafe_reclaim_from_nonowning(&group));
  return std::make_shared<PlannedOperation>(PlannedOperation{std::move(owner), collective, format, device, dtype,
                                                             num_elements, parts, feedback, in_one_hop,
                                                             std::move(operation), nullptr});
}

// Returns the group of a plan.
c10::intrusive_ptr<ProcessGroup> group_of(const PlannedOperation& planned) {
  auto group = planned.group.lock();
  TORCH_CHECK(group, "zcomm: the process group of this plan was destroyed");
  return group;
}

JobPtr gather_of_wires(ProcessGroup& group, const PlannedOperation& planned, const at::Tensor& wires,
                       const std::optional<Whole>& input, const CallSettings& settings) {
  TORCH_CHECK_VALUE(planned.collective == Collective::all_gather && planned.operation->wires_bytes() > 0,
                    "zcomm: wires: expected a gather in a format, got ", planned.operation->description());
  check_memory(wires, "wires", planned.operation->wires_bytes(), wires.device());
  check_gathered(planned, input, group.getSize(), wires.device());
  JobPtr job = group.compressed().gather(::c10d::OpType::_ALLGATHER_BASE, input.value_or(Whole()), {}, settings,
                                         planned.operation);
  job->written.resize(static_cast<std::size_t>(group.getSize()),
                      {nullptr, planned.num_elements / group.getSize(), dtype_of(planned.dtype).value()});
  job->outputs = {wires};
  job->wires = {static_cast<std::byte*>(wires.data_ptr()), wires.nbytes()};
  return job;
}

JobPtr job_of(ProcessGroup& group, const PlannedOperation& planned, const Whole& output,
              const std::optional<Whole>& input, const ::c10d::ReduceOp& op, const CallSettings& settings) {
  const int size = group.getSize();
  switch (planned.collective) {
    case Collective::all_gather:
      check_planned(planned, output, size, "output");
      check_gathered(planned, input, size, output[0].device());
      return group.compressed().gather(::c10d::OpType::_ALLGATHER_BASE, input.value_or(Whole()), output, settings,
                                       planned.operation);
    case Collective::reduce_scatter:
      TORCH_CHECK_VALUE(input, "zcomm: input: expected a tensor, got none");
      TORCH_CHECK_VALUE(output.size() == 1, "zcomm: output: expected one tensor, got ", output.size());
      check_planned(planned, *input, size, "input");
      check_shapes(*input, output, size, "input", "output", true);
      check_contiguous(output[0], "output", (*input)[0].device());
      return group.compressed().reduction(::c10d::OpType::_REDUCE_SCATTER_BASE, *input, output[0], op, settings,
                                          planned.operation);
    case Collective::all_reduce:
      check_planned(planned, output, size, "tensor");
      return group.compressed().all_reduction(::c10d::OpType::ALLREDUCE, output[0], op, settings, planned.operation);
    default:
      break;
  }
  throw ArgumentError("collective: unknown value");
}

}  // namespace

PlanOrVerdict plan_gather(ProcessGroup& group, TensorOrParts whole, TensorOrParts shard, const PolicyOverride* formats,
                          const Parts& parts, bool again, const PlannedPtr& like) {
  const Whole output = whole_of(std::move(whole)), input = whole_of(std::move(shard));
  Policy policy = policy_of(group, formats);
  policy.forms.in_place = true;  // FSDP2 gathers copies of its shards
  const int size = group.getSize();
  check_whole(output, parts, size, "output");
  check_whole(input, parts, 1, "input");
  Call call = describe(Collective::all_gather, Form::single, input[0], output);
  call.in_place = true;  // or into the parameters
  call.again = again;
  const bool is_bytes = dtype_of(input[0]) == DType::byte_pairs;
  if (is_bytes) {  // the policy decides as for floats, but nothing has to gain
    call.floating_point = true;
    call.dtype = DType::float32;
    policy.choice = Choice::always;
  }
  if (const Verdict verdict = group.compressed().decide(policy, call); verdict != Verdict::compressed) return verdict;
  if (is_bytes && group.compressed().topology().num_nodes() == 1) return Verdict::not_a_float;
  if (!is_bytes && is_all_exact(parts)) return Verdict::format_exact;
  const BlockFormat format = is_bytes ? BlockFormat{} : policy.all_gather;
  const bool in_one_hop = group.compressed().auto_policy().is_one_hop(policy, call);
  return planned(group, like, Collective::all_gather, {format, format}, output, parts, {}, in_one_hop, [&] {
    check_shapes(output, input, size, "output", "input");
    return make_all_gather(
        std::make_shared<const GatherPlan>(group.compressed().world(input[0].device().type()), shape_of(output, size),
                                           segments_of(parts, elements_of(input), format), in_one_hop));
  });
}

PlannedPtr plan_lossless(ProcessGroup& group, TensorOrParts whole, TensorOrParts shard, const Parts& parts,
                         const PlannedPtr& like) {
  const Whole output = whole_of(std::move(whole)), input = whole_of(std::move(shard));
  const int size = group.getSize();
  check_whole(output, parts, size, "output");
  check_whole(input, parts, 1, "input");
  return planned(group, like, Collective::all_gather, {}, output, parts, {}, false, [&] {
    const std::optional<DType> dtype = dtype_of(output[0]);
    TORCH_CHECK_VALUE(dtype && element_size(*dtype) == 2,
                      "zcomm: output: expected BFloat16, Half or bytes in pairs, of which differences are made, got ",
                      output[0].scalar_type());
    check_shapes(output, input, size, "output", "input");
    return make_lossless_gather(
        std::make_shared<const LosslessPlan>(group.compressed().world(input[0].device().type()), shape_of(output, size),
                                             segments_of(parts, elements_of(input), BlockFormat{})));
  });
}

PlanOrVerdict plan_reduce(ProcessGroup& group, const at::Tensor& output, TensorOrParts whole,
                          const ::c10d::ReduceOp& op, const PolicyOverride* formats, const Parts& parts,
                          const std::optional<BlockFormat>& feedback, const PlannedPtr& like) {
  const Whole input = whole_of(std::move(whole));
  const Policy policy = policy_of(group, formats);
  const int size = group.getSize();
  check_whole(input, parts, size, "input");
  Call call = describe(Collective::reduce_scatter, Form::single, output, input, op);
  call.num_bytes = size * static_cast<std::int64_t>(output.nbytes());
  if (const Verdict verdict = group.compressed().decide(policy, call); verdict != Verdict::compressed) return verdict;
  if (is_all_exact(parts)) return Verdict::format_exact;
  const HopFormats format = policy.reduce_scatter;
  return planned(group, like, Collective::reduce_scatter, format, input, parts, feedback, false, [&] {
    check_shapes(input, {output}, size, "input", "output", true);
    return make_reduce_scatter({group.compressed().world(output.device().type()), shape_of(input, size),
                                segments_of(parts, output.numel(), format), feedback});
  });
}

PlanOrVerdict plan_all_reduce(ProcessGroup& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                              const PolicyOverride* formats, const std::optional<BlockFormat>& feedback,
                              const PlannedPtr& like) {
  const Policy policy = policy_of(group, formats);
  const Call call = describe(Collective::all_reduce, Form::single, tensor, {&tensor, 1}, op);
  if (const Verdict verdict = group.compressed().decide(policy, call); verdict != Verdict::compressed) return verdict;
  return planned(group, like, Collective::all_reduce, policy.all_reduce, {tensor}, {}, feedback, false, [&] {
    return make_all_reduce({group.compressed().world(tensor.device().type()), tensor.numel(), view_of(tensor).dtype,
                            policy.all_reduce, feedback});
  });
}

WorkPtr run(const PlannedOperation& planned, std::optional<TensorOrParts> results, std::optional<TensorOrParts> values,
            const std::optional<::c10d::ReduceOp>& op, const std::optional<Residual>& residual, const SitePtr& site,
            bool async, const std::optional<at::Tensor>& wires) {
  const auto group = group_of(planned);
  TORCH_CHECK_VALUE(results.has_value() != wires.has_value(), "zcomm: wires: expected either them or an output");
  const Whole output = results ? whole_of(std::move(*results)) : Whole();
  std::optional<Whole> input;
  if (values) input = whole_of(std::move(*values));
  const bool is_sum = planned.collective != Collective::all_gather;
  TORCH_CHECK_VALUE(op.has_value() == is_sum, "zcomm: op: expected ", is_sum ? "one" : "none", ", got ",
                    op ? "one" : "none");
  const CallSettings settings{group->options()->policy, group->options()->timeout, async};
  JobPtr job = wires ? gather_of_wires(*group, planned, *wires, input, settings)
                     : job_of(*group, planned, output, input, op.value_or(::c10d::ReduceOp::SUM), settings);
  add_residual(*job, residual, planned.feedback);
  if (planned.kept) {
    check_memory(planned.kept->data, "kept", planned.operation->kept_bytes(), job->outputs[0].device());
    job->inputs.push_back(planned.kept->data);
    wait_for_decode(*planned.kept, job->outputs[0].device());
  }
  job->site = site;
  Call call;
  call.collective = planned.collective;
  // Of the sums: gradients that are reduced where they are may be narrower, and an exact call would have these bytes.
  call.num_bytes = planned.num_elements * static_cast<std::int64_t>(element_size(job->written.front().dtype));
  group->compressed().count(call, Verdict::compressed);
  return group->compressed().launch(std::move(job));
}

void decode(const PlannedOperation& planned, TensorOrParts whole, const at::Tensor& wires) {
  const auto group = group_of(planned);
  const Whole output = whole_of(std::move(whole));
  check_planned(planned, output, group->getSize(), "output");
  check_memory(wires, "wires", planned.operation->wires_bytes(), output[0].device());
  std::vector<TensorView> slots;
  add_segments(slots, output, group->getSize());
  Arguments arguments;
  arguments.outputs = slots;
  arguments.wires = {static_cast<std::byte*>(wires.data_ptr()), wires.nbytes()};
  const at::Device device = output[0].device();
  const c10::DeviceGuard on_device(device);
  planned.operation->decode(codec_of(output[0]), arguments, current_view(device));
  if (planned.kept) note_decode(*planned.kept, device);
}

WorkPtr prepare(ProcessGroup& group, const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers,
                bool async) {
  TORCH_CHECK_VALUE(!gathers.empty(), "zcomm: gathers: expected at least one, got none");
  auto job = std::make_unique<Job>(Collective::all_gather, ::c10d::OpType::_ALLGATHER_BASE, "zcomm:prepare_lossless",
                                   CallSettings{group.options()->policy, group.options()->timeout, async});
  std::vector<OperationPtr> operations;
  for (const auto& [planned, input, site] : gathers) {
    TORCH_CHECK_VALUE(planned && planned->group.lock().get() == &group && planned->kept,
                      "zcomm: gathers: expected those of this group that keep values, got others");
    TORCH_CHECK_VALUE(!input.is_cpu(), "zcomm: gathers: expected tensors on a GPU, got one on cpu: there sizes ",
                      "are sent with each gather");
    check_memory(planned->kept->data, "kept", planned->operation->kept_bytes(), input.device());
    const std::int64_t num_elements = planned->num_elements / group.getSize();
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
  return group.compressed().launch(std::move(job));
}

}  // namespace zcomm::c10d_binding
