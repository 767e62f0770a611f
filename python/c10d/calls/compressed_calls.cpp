#include "compressed_calls.hpp"

#include "c10d/base/tensors.hpp"
#include "collectives/operation_checks.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

// Appends the slots of one tensor, or one of each of several.
template <class Views>
void add_slots(Views& views, const std::vector<at::Tensor>& tensors, int size) {
  if (tensors.size() == 1) return add_segments(views, tensors, size);
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

}  // namespace

CompressedCalls::CompressedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options,
                                 MakeTransport host_transport, MakeTransport device_transport, InnerGroups& inner,
                                 GroupRecorder& recorder, const PythonHooks& hooks, std::shared_ptr<GroupErrors> errors)
    : group_(group),
      rank_(group.getRank()),
      size_(group.getSize()),
      options_(std::move(options)),
      inner_(inner),
      hooks_(hooks),
      errors_(std::move(errors)),
      recorder_(recorder),
      telemetry_(options_->sample_errors_every),
      auto_policy_(*this, inner, hooks, rank_, size_, options_),
      host_runner_(std::make_shared<HostRunner>(
          group,
          [this, make = std::move(host_transport)] {
            return std::make_unique<Communicator>(make(), topology(), make_cpu_codec(), make_host_workspace(),
                                                  world(at::kCPU).chunk_bytes);
          },
          *errors_)),
      device_runner_(
          [this, make = std::move(device_transport)](at::Device device) {
            auto workspace = std::make_unique<TorchWorkspace>(device.type());
            auto codec = make_cuda_codec(*workspace);
            return std::make_unique<Communicator>(make(), topology(), std::move(codec), std::move(workspace),
                                                  world(device.type()).chunk_bytes);
          },
          errors_) {}

const Topology& CompressedCalls::topology() {
  if (is_agreed_.load(std::memory_order_acquire)) return *topology_;
  const std::lock_guard lock(topology_mutex_);
  if (topology_) return *topology_;
  try {
    topology_.emplace(call_python(hooks_.agree));
  } catch (const Error& error) {
    std::rethrow_exception(errors_->record(error));
  }
  is_agreed_.store(true, std::memory_order_release);
  return *topology_;
}

World CompressedCalls::world(at::DeviceType device) {
  const std::size_t by_device = device == at::kCPU ? kDefaultChunkBytes : default_gpu_chunk_bytes(size_);
  const std::optional<int>& chosen = options_->chunk_bytes;
  return {topology(), rank_, chosen ? static_cast<std::size_t>(*chosen) : by_device};
}

void CompressedCalls::check_open() {
  TORCH_CHECK(!is_closed_, "zcomm: the process group was shut down");
  errors_->check();
}

Verdict CompressedCalls::decide(const Policy& policy, const Call& call) {
  check_open();
  topology();
  if (policy.exact_because) return *policy.exact_because;
  const Verdict verdict = zcomm::decide(policy, call, size_);
  enforce_strict(policy, call, verdict);
  const bool is_choice =
      verdict == Verdict::compressed && policy.choice == Choice::automatic && !is_exchange(call.collective);
  return is_choice && !auto_policy_.gains(policy, call) ? Verdict::no_gain : verdict;
}

void CompressedCalls::count(const Call& call, Verdict verdict) {
  stats_.withLock([&](Stats& stats) { stats.calls(call.collective, verdict).add(call.num_bytes); });
  if (!is_exchange(call.collective)) auto_policy_.steps().count(static_cast<int>(call.collective), call.num_bytes);
  ++num_calls_;
}

void CompressedCalls::count_other(std::span<const at::Tensor> tensors) {
  count_message(tensors);
  ++num_calls_;
}

void CompressedCalls::count_message(std::span<const at::Tensor> tensors) {
  check_open();
  std::int64_t num_bytes = 0;
  for (const at::Tensor& tensor : tensors) num_bytes += static_cast<std::int64_t>(tensor.nbytes());
  stats_.withLock([&](Stats& stats) { stats.others.add(num_bytes); });
}

std::uint64_t CompressedCalls::begin_message() {
  check_open();
  return seed_of(calls_in_step_.fetch_add(1));
}

// Odd factors make equal seeds unlikely.
std::uint64_t CompressedCalls::seed_of(std::uint64_t call_in_step) const {
  return 0xd1342543de82ef95 * step_.load() + 0xaf251af3b0f025b5 * call_in_step;
}

JobPtr CompressedCalls::gather(::c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                               const CallSettings& settings, OperationPtr operation) {
  const char* const title = inputs.empty() ? "zcomm:gather_secondary" : "zcomm:all_gather";
  auto job = std::make_unique<Job>(Collective::all_gather, type, title, settings);
  if (operation) {
    add_segments(job->written, outputs, size_);
  } else {
    add_slots(job->written, outputs, size_);
    at::Tensor& input = inputs.front();
    if (overlapped_slot(view_of(input), job->written, rank_) >= 0) {
      input = input.clone();  // other ranks' values would arrive in it
    }
    Call call;  // as far as classes of Choice::automatic distinguish calls
    call.dtype = job->written.front().dtype;
    for (const TensorView& slot : job->written) call.num_bytes += static_cast<std::int64_t>(slot.num_bytes());
    call.on_host = input.is_cpu();
    const bool one_hop = auto_policy_.is_one_hop(settings.policy, call);
    const Segment<BlockFormat> whole{input.numel(), settings.policy.all_gather};
    operation = make_all_gather(std::make_shared<const GatherPlan>(world(input.device().type()), shape_of(job->written),
                                                                   GatherSegments(&whole, 1), one_hop));
  }
  for (const at::Tensor& input : inputs) job->read.push_back(view_of(input));
  job->operation = std::move(operation);
  job->inputs = std::move(inputs);
  job->outputs = std::move(outputs);
  return job;
}

JobPtr CompressedCalls::reduction(::c10d::OpType type, std::vector<at::Tensor> inputs, const at::Tensor& output,
                                  const ::c10d::ReduceOp& op, const CallSettings& settings, OperationPtr operation) {
  auto job = std::make_unique<Job>(Collective::reduce_scatter, type, "zcomm:reduce_scatter", settings);
  // Ranks may have factors of their own, where the sum has one; those of a plan are alike.
  const bool scale = is_premul(op) && !operation;
  if (scale) inputs = scaled(inputs, factor_of(op, size_));
  if (operation) {
    add_segments(job->read, inputs, size_);
  } else {
    add_slots(job->read, inputs, size_);
    if (overlapped_slot(view_of(output), job->read, rank_) >= 0) {  // sums would be written over other contributions
      for (at::Tensor& input : inputs) input = input.clone();
      job->read.clear();
      add_slots(job->read, inputs, size_);
    }
    const Segment<HopFormats> whole{output.numel(), settings.policy.reduce_scatter};
    operation = make_reduce_scatter({world(output.device().type()), shape_of(job->read), ReduceSegments(&whole, 1)});
  }
  job->written.push_back(view_of(output));
  job->operation = std::move(operation);
  job->factor = scale ? 1.0f : static_cast<float>(factor_of(op, size_));
  job->inputs = std::move(inputs);
  job->outputs = {output};
  return job;
}

JobPtr CompressedCalls::all_reduction(::c10d::OpType type, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                      const CallSettings& settings, OperationPtr operation) {
  auto job = std::make_unique<Job>(Collective::all_reduce, type, "zcomm:all_reduce", settings);
  const TensorView view = view_of(tensor);
  job->written.push_back(view);
  job->inputs = {tensor};
  const bool scale = is_premul(op) && !operation;  // as above
  if (scale) scale_in_place(job->inputs, factor_of(op, size_));
  if (!operation) {
    operation =
        make_all_reduce({world(tensor.device().type()), view.num_elements, view.dtype, settings.policy.all_reduce});
  }
  job->operation = std::move(operation);
  job->factor = scale ? 1.0f : static_cast<float>(factor_of(op, size_));
  job->outputs = {tensor};
  return job;
}

WorkPtr CompressedCalls::exchange(Collective collective, ::c10d::OpType type, const char* title, ExchangePlan plan,
                                  std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                                  const CallSettings& settings) {
  auto job = std::make_unique<Job>(collective, type, title, settings);
  add_parts(job->read, inputs, plan.sent(), plan.dtype());
  add_parts(job->written, outputs, plan.received(), plan.dtype());
  job->operation = make_exchange(std::move(plan));
  job->outputs = outputs.empty() ? inputs : std::move(outputs);
  job->inputs = std::move(inputs);
  return launch(std::move(job));
}

WorkPtr CompressedCalls::broadcast(const at::Tensor& tensor, int root, const CallSettings& settings) {
  auto job = std::make_unique<Job>(Collective::broadcast, ::c10d::OpType::BROADCAST, "zcomm:broadcast", settings);
  const TensorView view = view_of(tensor);
  if (root == rank_) job->read.push_back(view);
  job->written.push_back(view);
  job->operation =
      make_broadcast(world(tensor.device().type()), root, view.num_elements, view.dtype, settings.policy.broadcast);
  job->outputs = {tensor};
  job->inputs = {tensor};
  return launch(std::move(job));
}

WorkPtr CompressedCalls::launch(JobPtr job) {
  job->sequence_number = num_calls_.load();
  // Draws seeds when calls are launched, not when they run, so that they belong to their step.
  job->seed = seed_of(job->rehearsal ? 0 : calls_in_step_.fetch_add(1));
  job->stats = &stats_;
  job->telemetry = &telemetry_;
  const RecordedCall recorded = recorded_call(*job);
  job->record = recorder_.begin(recorded);
  const auto event = record_launch(group_, options_->global_ranks_in_group, *job, recorded);
  const bool is_kept = !job->rehearsal;
  WorkPtr work;
  if (job->outputs[0].is_cpu()) {
    work = host_runner_->launch(std::move(job));
  } else {
    inner_.interrupt_coalescing();
    work = device_runner_.launch(std::move(job));
  }
  return is_kept ? inner_.track(std::move(work)) : work;
}

void CompressedCalls::abort() noexcept {
  host_runner_->abort();
  device_runner_.abort();
}

void CompressedCalls::stop() {
  is_closed_ = true;
  device_runner_.stop();
  host_runner_->stop();
}

}  // namespace zcomm::c10d_binding
