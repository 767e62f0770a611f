#include "compressed_calls.hpp"

#include "c10d/base/tensors.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
CompressedCalls::CompressedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options,
                                 MakeTransport host_transport, MakeTransport device_transport, InnerGroups& inner,
                                 GroupRecorder& recorder, CallHooks& call_hooks, const PythonHooks& hooks,
                                 std::shared_ptr<GroupErrors> errors)
    : group_(group),
      rank_(group.getRank()),
      size_(group.getSize()),
      options_(std::move(options)),
      inner_(inner),
      hooks_(hooks),
      errors_(std::move(errors)),
      profilers_(group, options_->global_ranks_in_group),
      telemetry_(options_->sample_errors_every),
      observers_{&call_hooks, &recorder, &profilers_, &telemetry_, &stats_},
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
  if (is_agreed_.load(std::memory_order_acquire)) return host_world_->topology;
  std::unique_lock lock(topology_mutex_);
  if (host_world_) return host_world_->topology;
  try {
    const Topology agreed(call_python(hooks_.agree));
    const auto chunk_bytes = [this](std::size_t by_device) {
      const std::optional<int>& chosen = options_->chunk_bytes;
      return chosen ? static_cast<std::size_t>(*chosen) : by_device;
    };
    device_world_ = {agreed, rank_, chunk_bytes(kDefaultGpuChunkBytes)};
    host_world_ = {agreed, rank_, chunk_bytes(kDefaultChunkBytes)};
  } catch (const Error& error) {
    const std::exception_ptr recorded = errors_->record(error);
    lock.unlock();
    errors_->announce();
    std::rethrow_exception(recorded);
  }
  is_agreed_.store(true, std::memory_order_release);
  return host_world_->topology;
}

const World& CompressedCalls::world(at::DeviceType device) {
  topology();
  return (device == at::kCPU ? host_world_ : device_world_).value();
}

void CompressedCalls::check_open() {
  TORCH_CHECK(!is_closed_, kShutDown);
  errors_->check();
}

Verdict CompressedCalls::decide(Request& request) {
  check_open();
  topology();
  const Policy& policy = request.settings.policy;
  const Call& call = request.call;
  if (policy.exact_because) return *policy.exact_because;
  const Verdict verdict = zcomm::decide(policy, call, size_);
  enforce_strict(policy, call, verdict);
  if (verdict == Verdict::compressed) options_->check_device(call.on_host);
  const bool is_choice =
      verdict == Verdict::compressed && policy.choice == Choice::automatic && !is_exchange(call.collective);
  if (!is_choice) return verdict;
  if (!auto_policy_.gains(policy, call)) return Verdict::no_gain;
  request.in_one_hop = call.collective == Collective::all_gather && auto_policy_.is_one_hop(policy, call);
  return verdict;
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

WorkPtr CompressedCalls::launch(Request&& request, OperationPtr operation) {
  const at::DeviceType device = request.device().type();
  JobPtr job = operation ? make_job(std::move(request), std::move(operation))
                         : make_job(std::move(request), world(device), plan_cache_);
  job->sequence_number = num_calls_.load();
  // Draws seeds when calls are launched, not when they run, so that they belong to their step.
  job->seed = seed_of(job->settings.rehearsal ? 0 : calls_in_step_.fetch_add(1));
  job->observers = observers_;
  std::array<std::shared_ptr<void>, std::tuple_size_v<decltype(observers_)>> events;
  for (std::size_t i = 0; i < events.size(); ++i) events[i] = observers_[i]->begin(*job);
  const bool is_kept = !job->settings.rehearsal;
  const std::uint64_t record = job->record;
  WorkPtr work;
  try {
    if (device == at::kCPU) {
      work = host_runner_->launch(std::move(job));
    } else {
      inner_.interrupt_coalescing();
      work = device_runner_.launch(std::move(job));
    }
  } catch (const std::exception& error) {
    for (Observer* const each : observers_) each->refused(record);
    // The call has been counted, and a retry counts again: this rank would take another way than its peers.
    if (options_->policy.choice == Choice::automatic && is_out_of_memory(error)) {
      device_runner_.abort("ran out of memory, and with compress='auto' ranks decide by the number of their calls");
    }
    throw;
  }
  for (std::size_t i = 0; i < events.size(); ++i) observers_[i]->launched(events[i], work);
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
