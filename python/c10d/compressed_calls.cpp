#include "compressed_calls.hpp"

#include "profiling.hpp"
#include "reduce_op.hpp"
#include "tensors.hpp"
#include "torch_workspace.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm::c10d_binding {
namespace {

// torch's backends have two names for a collective: one for profilers, and one that begins events and dumps.
const char* analyzers_name(const char* profilers_name) {
  const std::string_view name(profilers_name);
  if (name == "_allgather_base") return "_all_gather_base";
  if (name == "allreduce") return "all_reduce";
  return profilers_name;
}

// As describe() has it, as far as a class of Choice::automatic tells calls apart.
Call gather_of(const std::vector<TensorView>& slots, const at::Tensor& input) {
  Call call;
  call.dtype = slots.front().dtype;
  for (const TensorView& slot : slots) call.num_bytes += static_cast<std::int64_t>(slot.num_bytes());
  call.on_host = input.device().is_cpu();
  return call;
}

}  // namespace

CompressedCalls::CompressedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options,
                                 TransportFactories transports, InnerGroups& inner, GroupRecorder& recorder,
                                 Handshake& handshake, const PythonHooks& hooks, GroupErrors& errors)
    : group_(group),
      rank_(group.getRank()),
      size_(group.getSize()),
      options_(std::move(options)),
      transports_(std::move(transports)),
      recorder_(recorder),
      handshake_(handshake),
      telemetry_(options_->telemetry_every),
      auto_policy_(*this, inner, hooks, rank_, size_, options_),
      host_runner_(
          [this] { return make_communicator(at::kCPU, transports_.host(), make_cpu_codec(), make_host_workspace()); },
          errors, [&group] { return c10::intrusive_ptr<::c10d::Backend>::unsafe_reclaim_from_nonowning(&group); }),
      device_runner_(
          [this](at::Device device, const std::shared_ptr<Failure>& failure) {
            auto workspace = make_torch_workspace(device.type());
            auto codec = make_cuda_codec(*workspace);
            return make_communicator(device.type(), transports_.device(failure), std::move(codec),
                                     std::move(workspace));
          },
          errors, options_->high_priority_stream, options_->blocking_wait) {}

std::size_t CompressedCalls::chunk_bytes(at::DeviceType device) const {
  if (options_->chunk_bytes) return static_cast<std::size_t>(*options_->chunk_bytes);
  return device == at::kCPU ? kDefaultChunkBytes : default_gpu_chunk_bytes(size_);
}

std::unique_ptr<Communicator> CompressedCalls::make_communicator(at::DeviceType device,
                                                                 std::unique_ptr<Transport> transport,
                                                                 std::unique_ptr<Codec> codec,
                                                                 std::unique_ptr<Workspace> workspace) {
  return std::make_unique<Communicator>(with_ranges(std::move(transport)), handshake_.topology(),
                                        with_ranges(std::move(codec)), std::move(workspace), chunk_bytes(device));
}

Verdict CompressedCalls::decide(const Policy& policy, const Call& call) {
  device_runner_.check();
  handshake_.topology();
  const Verdict verdict = zcomm::decide(policy, call, size_);
  enforce_strict(policy, call, verdict);
  const bool is_choice = verdict == Verdict::compressed && policy.choice == Choice::automatic;
  return is_choice && !auto_policy_.gains(policy, call) ? Verdict::no_gain : verdict;
}

void CompressedCalls::count(const Call& call, Verdict verdict) {
  stats_.calls(call.collective, verdict).add(call.num_bytes);
  ++num_calls_;
}

void CompressedCalls::count_other(std::span<const at::Tensor> tensors) {
  device_runner_.check();
  std::int64_t num_bytes = 0;
  for (const at::Tensor& tensor : tensors) num_bytes += static_cast<std::int64_t>(tensor.nbytes());
  stats_.others.add(num_bytes);
  ++num_calls_;
}

CompressedCalls::Parts CompressedCalls::partition(const Policy& policy, const std::vector<Call>& calls,
                                                  const std::function<void(std::size_t)>& check) {
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    verdicts.push_back(decide(policy, calls[i]));
    if (verdicts[i] == Verdict::compressed) check(i);
  }
  Parts parts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    count(calls[i], verdicts[i]);
    (verdicts[i] == Verdict::compressed ? parts.compressed : parts.exact).push_back(i);
  }
  return parts;
}

std::shared_ptr<const GatherPlan> CompressedCalls::plan_gather(at::DeviceType device, SlotShape slots,
                                                               const std::vector<Segment<BlockFormat>>& segments,
                                                               bool one_hop) {
  ++stats_.plans;
  const Topology& nodes = topology();
  return std::make_shared<GatherPlan>(one_hop ? nodes.in_one_hop() : nodes, rank_, chunk_bytes(device),
                                      std::move(slots), segments);
}

std::shared_ptr<const DifferencePlan> CompressedCalls::plan_differences(at::DeviceType device, const SlotShape& slots) {
  ++stats_.plans;
  return std::make_shared<DifferencePlan>(handshake_.topology(), rank_, chunk_bytes(device), slots);
}

std::shared_ptr<const ReducePlan> CompressedCalls::plan_reduce(at::DeviceType device, SlotShape slots,
                                                               const std::vector<Segment<HopFormats>>& segments,
                                                               std::optional<BlockFormat> feedback) {
  ++stats_.plans;
  return std::make_shared<ReducePlan>(handshake_.topology(), rank_, chunk_bytes(device), std::move(slots), segments,
                                      feedback);
}

std::shared_ptr<const AllReducePlan> CompressedCalls::plan_all_reduce(at::DeviceType device, TensorView tensor,
                                                                      HopFormats formats,
                                                                      std::optional<BlockFormat> feedback) {
  ++stats_.plans;
  return std::make_shared<AllReducePlan>(handshake_.topology(), rank_, chunk_bytes(device), tensor.num_elements,
                                         tensor.dtype, formats, feedback);
}

WorkPtr CompressedCalls::launch(Stats::Compressed& cost, ::c10d::OpType type, const CallSettings& settings,
                                SitePtr site, std::unique_ptr<CompressedJob> job) {
  job->type = type;
  job->sequence_number = num_calls_.load();
  job->async = settings.async;
  job->timeout = settings.timeout;
  // As calls are launched, not as they run, so that a step's calls are its own. Odd factors make two alike unlikely.
  job->seed = options_->seed + 0xd1342543de82ef95 * step_.load() +
              0xaf251af3b0f025b5 * (settings.rehearsal ? 0 : calls_in_step_.fetch_add(1));
  job->site = std::move(site);
  job->telemetry = settings.rehearsal ? &no_telemetry_ : &telemetry_;
  job->cost = settings.rehearsal ? &stats_.rehearsals.cost : &cost;
  const CallSummary summary = job->summary();
  job->record = recorder_.begin({analyzers_name(summary.name), summary.in_elements, summary.out_elements,
                                 job->outputs[0].scalar_type(), job->timeout});
  const CallEvent event(*job, summary, group_, options_->global_ranks_in_group);
  Runner& runner = job->outputs[0].device().is_cpu() ? static_cast<Runner&>(host_runner_) : device_runner_;
  return runner.launch(std::move(job));
}

WorkPtr CompressedCalls::all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<TensorView> slots,
                                    std::vector<at::Tensor> outputs, const CallSettings& settings, GatherCall call) {
  if (!call.plan) {
    const bool one_hop = is_one_hop(settings.policy, gather_of(slots, input));
    call.plan =
        plan_gather(input.device().type(), shape_of(slots), {{input.numel(), settings.policy.all_gather}}, one_hop);
  }
  auto job = std::make_unique<AllGatherJob>();
  job->title = "zcomm:all_gather";
  job->inputs = {input};
  job->outputs = std::move(outputs);
  job->shard = view_of(input);
  job->slots = std::move(slots);
  job->plan = std::move(call.plan);
  const auto hold = [&](const at::Tensor& tensor) {
    job->inputs.push_back(tensor);
    return static_cast<std::byte*>(tensor.data_ptr());
  };
  if (call.secondary.defined()) job->extras.secondary = hold(call.secondary);
  if (call.reference.defined()) job->extras.reference = hold(call.reference);
  return launch(stats_.compressed(Collective::all_gather), type, settings, std::move(call.site), std::move(job));
}

WorkPtr CompressedCalls::gather_secondary(const at::Tensor& secondary, std::vector<TensorView> slots,
                                          const at::Tensor& output, const CallSettings& settings, GatherCall call) {
  auto job = std::make_unique<GatherSecondaryJob>();
  job->title = "zcomm:gather_secondary";
  job->inputs = {secondary};
  job->outputs = {output};
  job->secondary = static_cast<const std::byte*>(secondary.data_ptr());
  job->slots = std::move(slots);
  job->plan = std::move(call.plan);
  return launch(stats_.compressed(Collective::all_gather), ::c10d::OpType::_ALLGATHER_BASE, settings,
                std::move(call.site), std::move(job));
}

WorkPtr CompressedCalls::gather_differences(const std::optional<at::Tensor>& input, std::vector<TensorView> slots,
                                            const at::Tensor& output, const CallSettings& settings,
                                            DifferenceCall call) {
  auto job = std::make_unique<DifferenceGatherJob>();
  job->title = input ? "zcomm:all_gather" : "zcomm:gather_secondary";
  job->inputs = {call.held->data};
  if (input) {
    job->inputs.push_back(*input);
    job->shard = view_of(*input);
  }
  job->outputs = {output};
  job->slots = std::move(slots);
  job->plan = std::move(call.plan);
  job->held = std::move(call.held);
  return launch(stats_.compressed(Collective::all_gather), ::c10d::OpType::_ALLGATHER_BASE, settings,
                std::move(call.site), std::move(job));
}

WorkPtr CompressedCalls::prepare_differences(const std::vector<DifferenceShard>& shards, const CallSettings& settings) {
  auto job = std::make_unique<DifferencePrepareJob>();
  job->title = "zcomm:prepare_differences";
  job->text = std::to_string(shards.size()) + " gathers, the first of " + shards.front().call.plan->description();
  for (const auto& [input, call] : shards) {
    job->inputs.push_back(input);
    job->outputs.push_back(call.held->data);
    job->shards.push_back({call.plan, view_of(input), call.held, call.site});
  }
  return launch(stats_.compressed(Collective::all_gather), ::c10d::OpType::_ALLGATHER_BASE, settings, {},
                std::move(job));
}

WorkPtr CompressedCalls::reduce_scatter(::c10d::OpType type, const at::Tensor& output,
                                        const std::vector<TensorView>& slots, std::vector<at::Tensor> inputs,
                                        const ::c10d::ReduceOp& op, const CallSettings& settings, ReduceCall call) {
  if (!call.plan) {
    const HopFormats formats = call.direct ? HopFormats{{}, {}, true} : settings.policy.reduce_scatter;
    call.plan = plan_reduce(output.device().type(), shape_of(slots), {{output.numel(), formats}});
  }
  auto job = std::make_unique<ReduceScatterJob>();
  job->title = "zcomm:reduce_scatter";
  job->inputs = std::move(inputs);
  if (call.feedback) job->inputs.push_back(call.residual);
  job->outputs = {output};
  job->slots.assign(slots.begin(), slots.end());
  job->output = view_of(output);
  job->plan = std::move(call.plan);
  job->factor = static_cast<float>(factor_of(op, size_));
  job->feedback = call.feedback;
  Stats::Compressed& cost =
      job->plan->is_direct() ? stats_.direct_reduce_scatter.cost : stats_.compressed(Collective::reduce_scatter);
  return launch(cost, type, settings, std::move(call.site), std::move(job));
}

WorkPtr CompressedCalls::all_reduce(::c10d::OpType type, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                    const CallSettings& settings, ReduceCall call) {
  auto job = std::make_unique<AllReduceJob>();
  job->title = "zcomm:all_reduce";
  job->inputs = {tensor};
  if (call.feedback) job->inputs.push_back(call.residual);
  job->outputs = {tensor};
  job->tensor = view_of(tensor);
  job->plan = call.all_reduce_plan ? std::move(call.all_reduce_plan)
                                   : plan_all_reduce(tensor.device().type(), job->tensor, settings.policy.all_reduce);
  job->factor = static_cast<float>(factor_of(op, size_));
  job->feedback = call.feedback;
  return launch(stats_.compressed(Collective::all_reduce), type, settings, std::move(call.site), std::move(job));
}

void CompressedCalls::abort(const std::string& reason) noexcept {
  host_runner_.abort(reason);
  device_runner_.abort(reason);
}

void CompressedCalls::stop() {
  device_runner_.stop();
  host_runner_.stop();
}

}  // namespace zcomm::c10d_binding
