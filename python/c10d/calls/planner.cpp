#include "planner.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "c10d/base/tensors.hpp"
#include "collectives/operation_checks.hpp"
#include "zcomm/error.hpp"
#include "zcomm/exchange.hpp"

namespace zcomm::c10d_binding {
namespace {

template <class Format>
std::vector<Segment<Format>> segments_of(const Parts& parts, std::int64_t num_elements, Format format) {
  if (parts.empty()) return {{num_elements, format}};
  std::vector<Segment<Format>> segments;
  for (const auto& [count, exact] : parts) segments.push_back({count, exact ? Format{} : format});
  return segments;
}

SlotShape slots_of(const std::vector<at::Tensor>& whole, int size) {
  const std::int64_t count = elements_of(whole) / size;
  return {std::vector<std::int64_t>(static_cast<std::size_t>(size), count), dtype_of(whole[0]).value()};
}

OperationPtr make_gather(const Request& request, World world) {
  SlotShape slots = slots_of(request.outputs, world.topology.size());
  const std::int64_t num_elements = elements_of(request.inputs);
  if (request.lossless) {
    return make_lossless_gather(std::make_shared<const LosslessPlan>(
        std::move(world), std::move(slots), segments_of(request.parts, num_elements, BlockFormat{})));
  }
  // On hosts chunks overlap with the codec, and wait for nothing.
  const bool in_one_chunk = request.leaves_wires && !request.device().is_cpu();
  return make_all_gather(std::make_shared<const GatherPlan>(
      std::move(world), std::move(slots), segments_of(request.parts, num_elements, request.settings.policy.all_gather),
      request.in_one_hop, 1, in_one_chunk));
}

ExchangePlan plan_exchange(const Request& request, World world) {
  const Policy& policy = request.settings.policy;
  const HopFormats formats = policy.formats_of(request.call.collective);
  const at::Tensor& any = request.inputs.empty() ? request.outputs[0] : request.inputs[0];
  const DType dtype = dtype_of(any).value();
  switch (request.call.collective) {
    case Collective::all_to_all: {
      const auto min_bytes = static_cast<std::size_t>(policy.min_bytes / world.topology.size());
      return ExchangePlan::all_to_all(std::move(world), request.sent, request.received, dtype, formats, min_bytes);
    }
    case Collective::gather:
      return ExchangePlan::gather(std::move(world), request.root, any.numel(), dtype, formats);
    case Collective::scatter:
      return ExchangePlan::scatter(std::move(world), request.root, request.outputs[0].numel(), dtype, formats);
    default:
      throw ArgumentError("collective: unknown value");
  }
}

// Appends the slots of a tensor, of one for each part, or of a list with one for each rank.
template <class Views>
void add_slots(Views& views, const std::vector<at::Tensor>& tensors, Form form, int size) {
  if (form != Form::list) return add_segments(views, tensors, size);
  for (const at::Tensor& tensor : tensors) views.push_back(view_of(tensor));
}

// Appends a view of each rank's part. The tensors hold the parts side by side, or one each; a rank without a part has
// no tensor, if there are fewer.
template <class Views>
void add_parts(Views& views, const std::vector<at::Tensor>& tensors, const std::vector<std::int64_t>& lengths,
               DType dtype) {
  std::size_t next = 0;
  TensorView rest{nullptr, 0, dtype};
  for (const std::int64_t length : lengths) {
    while (rest.num_elements == 0 && length > 0) rest = view_of(tensors[next++]);
    views.push_back(rest.slice(0, length));
    rest = rest.slice(length, rest.num_elements);
  }
}

// Leaves views of a gather's wires lengths without addresses.
void add_views_of_gather(Job& job, int size) {
  for (const at::Tensor& input : job.inputs) job.read.push_back(view_of(input));
  if (job.leaves_wires) {
    const DType dtype = job.call.dtype.value();
    const std::int64_t count = job.call.num_bytes / static_cast<std::int64_t>(element_size(dtype)) / size;
    job.written.resize(static_cast<std::size_t>(size), {nullptr, count, dtype});
    job.wires = {static_cast<std::byte*>(job.outputs[0].data_ptr()), job.outputs[0].nbytes()};
  } else if (job.shares.empty()) {  // preparations write nothing
    add_slots(job.written, job.outputs, job.call.form, size);
  }
}

void add_views(Job& job, const World& world) {
  const int size = world.topology.size();
  const Collective collective = job.call.collective;
  if (collective == Collective::all_gather) return add_views_of_gather(job, size);
  if (collective == Collective::reduce_scatter) add_slots(job.read, job.inputs, job.call.form, size);
  const TensorView output = view_of(job.outputs[0]);
  if (collective == Collective::broadcast && job.root == world.rank) job.read.push_back(output);
  job.written.push_back(output);
  job.factor = static_cast<float>(factor_of(job.op, size));
}

// Applies factors that ranks may have of their own, where the sum has one.
void apply_factor(Job& job, int size) {
  if (!is_premul(job.op)) return;
  const double factor = factor_of(job.op, size);
  if (job.call.collective == Collective::all_reduce) {
    scale_in_place(job.outputs, factor);
  } else {
    job.inputs = scaled(job.inputs, factor);
  }
  job.op = ::c10d::ReduceOp::SUM;
}

// Tells whether results, or other ranks' values, would be written over inputs that are still to be sent.
bool is_overlapping(const Job& job, int rank) {
  if (job.call.collective == Collective::all_gather) return overlapped_slot(job.read.front(), job.written, rank) >= 0;
  return job.call.collective == Collective::reduce_scatter && overlapped_slot(job.written.front(), job.read, rank) >= 0;
}

}  // namespace

OperationPtr make_operation(const Request& request, World world) {
  const Policy& policy = request.settings.policy;
  switch (request.call.collective) {
    case Collective::all_gather:
      return make_gather(request, std::move(world));
    case Collective::reduce_scatter: {
      SlotShape slots = slots_of(request.inputs, world.topology.size());
      return make_reduce_scatter({std::move(world), std::move(slots),
                                  segments_of(request.parts, request.outputs[0].numel(), policy.reduce_scatter),
                                  request.residual_format});
    }
    case Collective::all_reduce: {
      const TensorView tensor = view_of(request.outputs[0]);
      return make_all_reduce(
          {std::move(world), tensor.num_elements, tensor.dtype, policy.all_reduce, request.residual_format});
    }
    case Collective::broadcast: {
      const TensorView tensor = view_of(request.outputs[0]);
      // All ranks get the bits of one wire, in the format of the slowest link.
      const Link slowest = world.topology.num_nodes() > 1 ? Link::inter_node : Link::intra_node;
      return make_broadcast(std::move(world), request.root, tensor.num_elements, tensor.dtype,
                            policy.exchanges.on(slowest));
    }
    case Collective::all_to_all:
    case Collective::gather:
    case Collective::scatter:
      break;  // jobs alone have them, with the lengths of their plans
  }
  throw ArgumentError("collective: expected one whose operation can be held, got an exchange");
}

OperationPtr PlanCache::find(const Request& request, const World& world) {
  if (!request.parts.empty() || request.residual_format || request.lossless) return make_operation(request, world);
  const bool is_reduction = request.call.collective == Collective::reduce_scatter;
  const std::vector<at::Tensor>& whole = is_reduction ? request.inputs : request.outputs;
  const Key key{request.call.collective,  request.settings.policy.formats_of(request.call.collective),
                whole[0].device().type(), whole[0].scalar_type(),
                elements_of(whole),       request.root,
                request.in_one_hop};
  const std::lock_guard lock(mutex_);
  for (const auto& [known, operation] : entries_) {
    if (known == key) return operation;
  }
  OperationPtr made = make_operation(request, world);
  if (entries_.size() < kCapacity) {
    entries_.emplace_back(key, made);
  } else {
    entries_[num_replaced_++ % kCapacity] = {key, made};
  }
  return made;
}

JobPtr make_job(Request&& request, const World& world, PlanCache& cache) {
  auto job = std::make_unique<Job>(std::move(request));
  if (traits_of(job->call.collective).has_exchange_plan) {
    ExchangePlan plan = plan_exchange(*job, world);
    add_parts(job->read, job->inputs, plan.sent(), plan.dtype());
    add_parts(job->written, job->outputs, plan.received(), plan.dtype());
    if (job->outputs.empty()) job->outputs = job->inputs;
    job->operation = make_exchange(std::move(plan));
    return job;
  }
  apply_factor(*job, world.topology.size());
  add_views(*job, world);
  if (is_overlapping(*job, world.rank)) {
    for (at::Tensor& input : job->inputs) input = input.clone();
    job->read.clear();
    job->written.clear();
    add_views(*job, world);
  }
  job->operation = cache.find(*job, world);
  return job;
}

JobPtr make_job(Request&& request, OperationPtr operation) {
  auto job = std::make_unique<Job>(std::move(request));
  add_views(*job, operation->world());
  std::ranges::move(job->memory, std::back_inserter(job->inputs));
  job->operation = std::move(operation);
  return job;
}

}  // namespace zcomm::c10d_binding
