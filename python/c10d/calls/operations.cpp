#include "operations.hpp"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "c10d/base/tensors.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

using Whole = std::vector<at::Tensor>;

bool is_all_exact(const Parts& parts) {
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.second; });
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

// Checks a planned gather's input; empty: the values are those that are kept.
void check_gathered(const PlannedOperation& planned, const Whole& input, int size, at::Device device) {
  TORCH_CHECK_VALUE(!input.empty() || planned.secondary,
                    "zcomm: input: expected a tensor, as nothing is kept, got none");
  if (input.empty()) return;
  check_whole(input, planned.parts, 1, "input");
  TORCH_CHECK_VALUE(input[0].scalar_type() == planned.dtype && elements_of(input) * size == planned.num_elements,
                    "zcomm: input: expected ", planned.num_elements / size, " ", planned.dtype,
                    ", as was planned, got ", elements_of(input), " ", input[0].scalar_type());
  for (const at::Tensor& part : input) check_contiguous(part, "input", device);
}

// Records the end of a decode of kept values. Events of a graph are of no use outside of it.
void note_decode(TensorSecondaryShard& secondary, at::Device device) {
  secondary.decoded.reset();
  if (device.is_cpu() || is_capturing(current_view(device))) return;
  secondary.decoded.emplace(device.type());
  secondary.decoded->record(current_stream(device));
}

// Makes the current stream wait for that, before a call may overwrite the values.
void wait_for_decode(const TensorSecondaryShard& secondary, at::Device device) {
  if (secondary.decoded && !is_capturing(current_view(device))) secondary.decoded->block(current_stream(device));
}

// The callers are FSDP2, DDP's hook and outer steps.
CallSettings settings_of(CompressedCalls& calls, const PolicyOverride* formats) {
  const Policy& options = calls.options().policy;
  Policy policy =
      effective_policy(formats != nullptr ? formats->apply(options, calls.group()) : options, calls.group());
  policy.known = policy.copies = true;
  return {std::move(policy), calls.options().timeout};
}

// Returns `like` if it was planned so, else a new plan.
PlannedPtr planned(CompressedCalls& calls, const Request& request, const Whole& whole, const PlannedPtr& like) {
  const PlanKey key{request.call.collective,
                    request.lossless ? HopFormats() : request.settings.policy.formats_of(request.call.collective),
                    whole[0].device().type(),
                    whole[0].scalar_type(),
                    elements_of(whole),
                    request.parts,
                    request.residual_format,
                    request.in_one_hop,
                    request.leaves_wires};
  if (like && like->group.lock().get() == &calls.group() && static_cast<const PlanKey&>(*like) == key) return like;
  c10::weak_intrusive_ptr<::c10d::Backend> owner(BackendPtr::unsafe_reclaim_from_nonowning(&calls.group()));
  return std::make_shared<PlannedOperation>(
      PlannedOperation{key, std::move(owner), &calls, make_operation(request, calls.world(key.device)), nullptr});
}

// Returns the group of a plan, with which its calls live.
BackendPtr group_of(const PlannedOperation& planned) {
  auto group = planned.group.lock();
  TORCH_CHECK(group, "zcomm: the process group of this plan was destroyed");
  return group;
}

// Checks the tensors of a call, and names it as torch does.
void check_request(const PlannedOperation& planned, Request& request, int size) {
  const at::Tensor& output = request.outputs[0];
  request.call.collective = planned.collective;
  if (request.leaves_wires) {
    TORCH_CHECK_VALUE(planned.collective == Collective::all_gather && planned.operation->memory().wires > 0,
                      "zcomm: wires: expected a gather in a format, got ", planned.operation->description());
    check_memory(output, "wires", planned.operation->memory().wires, output.device());
  }
  switch (planned.collective) {
    case Collective::all_gather:
      request.type = ::c10d::OpType::_ALLGATHER_BASE;
      if (!request.leaves_wires) check_planned(planned, request.outputs, size, "output");
      return check_gathered(planned, request.inputs, size, output.device());
    case Collective::reduce_scatter:
      request.type = ::c10d::OpType::_REDUCE_SCATTER_BASE;
      TORCH_CHECK_VALUE(!request.inputs.empty(), "zcomm: input: expected a tensor, got none");
      TORCH_CHECK_VALUE(request.outputs.size() == 1, "zcomm: output: expected one tensor, got ",
                        request.outputs.size());
      check_planned(planned, request.inputs, size, "input");
      check_shapes(request.inputs, request.outputs, size, "input", "output", true);
      return check_contiguous(output, "output", request.inputs[0].device());
    default:
      request.type = ::c10d::OpType::ALLREDUCE;
      request.inputs = request.outputs;
      return check_planned(planned, request.outputs, size, "tensor");
  }
}

}  // namespace

Whole whole_of(TensorOrParts given) {
  if (auto* const parts = std::get_if<Whole>(&given)) return std::move(*parts);
  return {std::get<at::Tensor>(std::move(given))};
}

const Gather& gather_of(const PlannedOperation& planned) {
  const auto* const gather = dynamic_cast<const Gather*>(planned.operation.get());
  TORCH_CHECK_VALUE(gather != nullptr, "zcomm: operation: expected a gather, got ", planned.operation->description());
  return *gather;
}

PlanOrVerdict plan(CompressedCalls& calls, Request request, const PolicyOverride* formats, const PlannedPtr& like) {
  const int size = calls.size();
  const bool is_gather = request.call.collective == Collective::all_gather;
  const bool is_reduction = request.call.collective == Collective::reduce_scatter;
  const Whole& whole = is_reduction ? request.inputs : request.outputs;
  const Whole& shard = is_reduction ? request.outputs : request.inputs;
  const char* const whole_name = is_reduction ? "input" : "output";
  const char* const shard_name = is_reduction ? "output" : "input";
  check_whole(whole, request.parts, size, whole_name);
  if (is_gather) check_whole(shard, request.parts, 1, shard_name);
  const bool again = request.call.again;
  request.settings = settings_of(calls, formats);
  request.call = describe(request.call.collective, Form::single, shard[0], whole, request.op);
  request.call.again = again;
  const std::optional<DType> dtype = dtype_of(whole[0]);
  if (request.lossless) {
    TORCH_CHECK_VALUE(dtype && element_size(*dtype) == 2,
                      "zcomm: output: expected BFloat16, Half or bytes in pairs for differences, got ",
                      whole[0].scalar_type());
  } else {
    const bool is_bytes = is_gather && dtype == DType::byte_pairs;
    if (is_reduction) request.call.num_bytes = size * static_cast<std::int64_t>(shard[0].nbytes());
    if (is_bytes) {  // the policy decides as for floats, but nothing has to gain
      request.call.floating_point = true;
      request.call.dtype = DType::float32;
      request.settings.policy.choice = Choice::always;
    }
    if (const Verdict verdict = calls.decide(request); verdict != Verdict::compressed) return verdict;
    if (is_bytes && calls.topology().num_nodes() == 1) return Verdict::not_a_float;
    if (!is_bytes && is_all_exact(request.parts) && !request.compared) return Verdict::format_exact;
    if (is_bytes) request.settings.policy.all_gather = BlockFormat{};
  }
  if (is_gather || is_reduction) check_shapes(whole, shard, size, whole_name, shard_name, is_reduction);
  return planned(calls, request, whole, like);
}

WorkPtr run(const PlannedOperation& planned, std::optional<TensorOrParts> results, std::optional<TensorOrParts> values,
            const std::optional<::c10d::ReduceOp>& op, const std::optional<Residual>& residual, const SitePtr& site,
            bool async, const std::optional<at::Tensor>& wires) {
  const BackendPtr group = group_of(planned);
  CompressedCalls& calls = *planned.calls;
  TORCH_CHECK_VALUE(results.has_value() != wires.has_value(),
                    "zcomm: wires: expected exactly one of wires and output, got ", results ? "both" : "none");
  const bool is_sum = planned.collective != Collective::all_gather;
  TORCH_CHECK_VALUE(op.has_value() == is_sum, "zcomm: op: expected ", is_sum ? "one" : "none", ", got ",
                    op ? "one" : "none");
  Request request;
  request.settings = {{}, calls.options().timeout, async};
  request.leaves_wires = wires.has_value();
  request.outputs = results ? whole_of(std::move(*results)) : Whole{*wires};
  if (values) request.inputs = whole_of(std::move(*values));
  request.op = op.value_or(::c10d::ReduceOp::SUM);
  request.site = site;
  check_request(planned, request, calls.size());
  const at::Device device = request.outputs[0].device();
  TORCH_CHECK_VALUE(residual.has_value() == planned.residual_format.has_value(), "zcomm: residual: expected ",
                    planned.residual_format ? "one" : "none", ", as was planned, got ", residual ? "one" : "none");
  if (residual) {
    const auto& [data, decay, is_empty] = *residual;
    check_memory(data, "residual", planned.operation->memory().residual, device);
    request.feedback = Feedback{static_cast<std::byte*>(data.data_ptr()), *planned.residual_format, decay, is_empty};
    request.memory.push_back(data);
  }
  if (planned.secondary) {
    check_memory(planned.secondary->data, "secondary", planned.operation->memory().secondary, device);
    request.memory.push_back(planned.secondary->data);
    wait_for_decode(*planned.secondary, device);
  }
  // Of the sums: gradients that are reduced where they are may be narrower, and an exact call would have these bytes.
  request.call.dtype = dtype_of(request.leaves_wires ? planned.dtype : request.outputs[0].scalar_type());
  request.call.num_bytes = planned.num_elements * static_cast<std::int64_t>(element_size(*request.call.dtype));
  calls.count(request.call, is_sum && is_all_exact(planned.parts) ? Verdict::layout : Verdict::compressed);
  return calls.launch(std::move(request), planned.operation);
}

void decode(const PlannedOperation& planned, TensorOrParts whole, const at::Tensor& wires) {
  const BackendPtr group = group_of(planned);
  const Whole output = whole_of(std::move(whole));
  check_planned(planned, output, planned.calls->size(), "output");
  check_memory(wires, "wires", planned.operation->memory().wires, output[0].device());
  std::vector<TensorView> slots;
  add_segments(slots, output, planned.calls->size());
  Arguments arguments;
  arguments.outputs = slots;
  arguments.wires = {static_cast<std::byte*>(wires.data_ptr()), wires.nbytes()};
  const at::Device device = output[0].device();
  const c10::DeviceGuard on_device(device);
  gather_of(planned).decode(codec_of(output[0]), arguments, current_view(device));
  if (planned.secondary) note_decode(*planned.secondary, device);
}

WorkPtr prepare(CompressedCalls& calls, const std::vector<std::tuple<PlannedPtr, at::Tensor, SitePtr>>& gathers,
                bool async) {
  TORCH_CHECK_VALUE(!gathers.empty(), "zcomm: gathers: expected at least one, got none");
  Request request;
  request.type = ::c10d::OpType::_ALLGATHER_BASE;
  request.settings = {{}, calls.options().timeout, async};
  std::vector<GatherPtr> operations;
  for (const auto& [planned, input, site] : gathers) {
    TORCH_CHECK_VALUE(planned && planned->group.lock().get() == &calls.group() && planned->secondary,
                      "zcomm: gathers: expected operations of this group that keep values, got another one");
    TORCH_CHECK_VALUE(!input.is_cpu(), "zcomm: gathers: expected tensors on a GPU, got one on cpu: there sizes ",
                      "are sent with each gather");
    check_memory(planned->secondary->data, "secondary", planned->operation->memory().secondary, input.device());
    const std::int64_t num_elements = planned->num_elements / calls.size();
    TORCH_CHECK_VALUE(input.is_contiguous() && input.scalar_type() == planned->dtype && input.numel() == num_elements,
                      "zcomm: gathers: expected ", num_elements, " contiguous ", planned->dtype,
                      ", as was planned, got ", input.numel(), input.is_contiguous() ? " contiguous " : " ",
                      input.scalar_type());
    operations.push_back(std::dynamic_pointer_cast<Gather>(planned->operation));
    request.inputs.push_back(input);
    request.outputs.push_back(planned->secondary->data);
    request.shares.emplace_back(site, planned->operation->num_chunks());  // one header per chunk
  }
  return calls.launch(std::move(request), make_preparation(std::move(operations)));
}

WorkPtr gather_numbers(CompressedCalls& calls, const at::Tensor& output, const at::Tensor& input, const SitePtr& site) {
  Request request;
  request.type = ::c10d::OpType::_ALLGATHER_BASE;
  request.settings = {calls.options().policy, calls.options().timeout, false, true};
  request.settings.policy.all_gather = BlockFormat{};
  request.inputs = {input};
  request.outputs = {output};
  request.site = site;
  calls.stats().withLock([&](Stats& stats) { stats.rehearsals.add(static_cast<std::int64_t>(output.nbytes())); });
  return calls.launch(std::move(request));
}

}  // namespace zcomm::c10d_binding
