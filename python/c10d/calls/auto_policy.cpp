#include "auto_policy.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <tuple>

#include "c10d/base/tensors.hpp"
#include "operations.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

std::string text_of(const Call& call) {
  return std::string(to_string(call.collective)) + " of " + std::to_string(call.num_bytes) + " bytes of " +
         std::string(to_string(*call.dtype)) + (call.again ? ", and again from secondary shards" : "");
}

at::Device device_of(const Call& call) {
  return call.on_host ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(call.device));
}

bool is_captured(const Call& call) { return !call.on_host && is_capturing(current_view(device_of(call))); }

// Waits until a GPU has done the work on the caller's stream. On a CPU, works that were waited for are done.
void finish(at::Device device) {
  if (!device.is_cpu()) current_stream(device).synchronize();
}

// Returns a class without a decision.
AutoPolicy::Decision class_of(const Policy& policy, const Call& call) {
  const auto log2_bytes = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(call.num_bytes))) - 1;
  return {call.collective, *call.dtype, log2_bytes, policy.formats_of(call.collective), call.on_host, call.again};
}

}  // namespace

bool AutoPolicy::is_one_hop(const Policy& policy, const Call& call) const {
  if (policy.choice != Choice::automatic) return false;
  Decision decision = class_of(policy, call);
  return find(decision) && decision.times.is_one_hop();
}

bool AutoPolicy::gains(const Policy& policy, const Call& call) {
  Decision decision = class_of(policy, call);
  const WithoutGil no_gil;
  if (!find(decision)) {
    decide(decision, policy, call);
    const std::lock_guard lock(mutex_);
    decisions_.push_back(decision);
  }
  return decision.by == Decision::kTable ? decision.compressed : gains_in_steps(decision, call);
}

// Decides without steps, if none are known.
void AutoPolicy::decide(Decision& decision, const Policy& policy, const Call& call) {
  if (const std::optional<Round> found = look_up(decision, call)) {
    decision.by = Decision::kTable;
    decision.times = *found;
    decision.compressed = found->gains();
  } else if (steps_.compresses()) {
    decision.by = Decision::kSteps;
    decision.compressed = true;
  } else {
    rehearse(decision, policy, call);
  }
}

// Decides by steps, if any are known. Their compressed calls are those that gain by themselves; all, if none does.
bool AutoPolicy::gains_in_steps(const Decision& by_itself, const Call& call) {
  std::optional<bool> compresses;
  if (is_captured(call)) {  // cannot wait, and its replays have one way for all steps
    compresses = steps_.decision();
  } else {
    const auto now = [&] {
      finish(device_of(call));
      return call_python(hooks_.now);
    };
    const auto agree = [this](std::vector<std::int64_t> numbers) { return largest(std::move(numbers)); };
    if (steps_.begin_call(now, agree)) call_python(hooks_.decided);
    compresses = steps_.compresses();
  }
  if (!compresses) return by_itself.compressed;
  return *compresses && (by_itself.compressed || !any_gains());
}

bool AutoPolicy::any_gains() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(decisions_.begin(), decisions_.end(),
                     [](const Decision& decision) { return decision.by == Decision::kCalls && decision.compressed; });
}

bool AutoPolicy::find(Decision& decision) const {
  const std::lock_guard lock(mutex_);
  const auto key_of = [](const Decision& of) {
    return std::tie(of.collective, of.dtype, of.log2_bytes, of.formats, of.on_host, of.again);
  };
  const auto found = std::ranges::find(decisions_, key_of(decision), key_of);
  if (found == decisions_.end()) return false;
  decision = *found;
  return true;
}

std::vector<AutoPolicy::Decision> AutoPolicy::decisions() const {
  const std::optional<bool> by_steps = steps_.decision();
  const bool any = any_gains();
  std::vector<Decision> all;
  {
    const std::lock_guard lock(mutex_);
    all = decisions_;
  }
  for (Decision& decision : all) {
    if (!by_steps || decision.by == Decision::kTable) continue;
    decision.by = Decision::kSteps;
    decision.compressed = *by_steps && (decision.compressed || !any);
  }
  return all;
}

// Excludes reductions, whose bits would differ in one hop, and gathers that fill secondary shards, which need two hops.
// Over NCCL a rank is connected only to its peers in two hops.
bool AutoPolicy::may_take_one_hop(const Call& call) const {
  return call.collective == Collective::all_gather && call.on_host && !call.again &&
         calls_.topology().is_hierarchical();
}

std::optional<Round> AutoPolicy::look_up(const Decision& decision, const Call& call) {
  if (!hooks_.look_up) return std::nullopt;
  check_same_call(call);
  const auto found = call_python(hooks_.look_up, call.num_bytes, call.on_host ? "cpu" : "cuda",
                                 std::string(to_string(call.collective)), std::string(to_string(*call.dtype)),
                                 decision.formats.to_string(), call.again);
  const auto [exact, compressed, one_hop] = found.value_or(PythonHooks::Seconds{});
  // Takes the maximum over ranks, which may have read different files.
  const auto agreed =
      largest({found ? 0 : 1, std::llround(exact * 1e9), std::llround(compressed * 1e9), std::llround(one_hop * 1e9)});
  if (agreed[0] != 0) return std::nullopt;
  return Round{agreed[1], agreed[2], may_take_one_hop(call) ? agreed[3] : 0};
}

void AutoPolicy::rehearse(Decision& decision, const Policy& policy, const Call& call) {
  const c10::DeviceGuard on_device(device_of(call));
  check_can_rehearse(call);
  check_same_call(call);
  const Ways all = ways(policy, call);
  // Times each way behind an all-reduce and a barrier, so that all ways begin alike.
  const auto time_all = [&] {
    std::array<std::int64_t, 3> times{};
    for (std::size_t way = 0; way < all.size(); ++way) times[way] = largest({time(all[way], call)})[0];
    return Round{times[0], times[1], times[2]};
  };
  time_all();  // not counted: it connects ranks and touches fresh memory
  std::vector<Round> rounds;
  do {
    rounds.push_back(time_all());
  } while (!suffice(rounds));
  decision.by = Decision::kCalls;
  decision.times = medians_of(rounds);
  decision.rounds = static_cast<int>(rounds.size());
  decision.compressed = decision.times.gains();
}

// Rejects captured and coalesced calls: a rehearsal waits for the GPU, or for works that have not begun.
void AutoPolicy::check_can_rehearse(const Call& call) const {
  if (call.on_host) return;
  const bool captured = is_captured(call);
  if (!captured && !inner_.is_coalescing()) return;
  throw Error("compress: expected for 'auto' a call of each kind " +
              std::string(captured ? "before the capture of a CUDA graph" : "that is not coalesced") +
              ", which is timed, or decisions=FILE of 'python -m zcomm_bench measure', got the first " + text_of(call));
}

// Makes tensors for the rehearsal: a call may change its input, and a caller may hold its output. They are zeros, as
// unfilled memory may have NaNs, for which torch ends the process if TORCH_NCCL_NAN_CHECK is set.
AutoPolicy::Ways AutoPolicy::ways(const Policy& policy, const Call& call) {
  const auto item_bytes = static_cast<std::int64_t>(element_size(*call.dtype));
  const std::int64_t shard_elements = std::max<std::int64_t>(1, call.num_bytes / item_bytes / size_);
  const at::Tensor whole =
      at::zeros({shard_elements * size_}, at::device(device_of(call)).dtype(scalar_type_of(*call.dtype)));
  ::c10d::Backend& inner = call.on_host ? inner_.cpu() : inner_.cuda();
  Request request;
  request.call = call;
  request.call.form = Form::single;
  request.settings = {policy, options_->timeout, false, true};
  request.inputs = request.outputs = {whole};
  const auto compressed = [this](const Request& of) { return [this, of] { return calls_.launch(Request(of)); }; };
  switch (call.collective) {
    case Collective::all_gather:
      request.type = ::c10d::OpType::_ALLGATHER_BASE;
      request.inputs = {whole.narrow(0, rank_ * shard_elements, shard_elements)};
      return gathers(request, inner);
    case Collective::reduce_scatter:
      request.type = ::c10d::OpType::_REDUCE_SCATTER_BASE;
      request.outputs = {at::empty({shard_elements}, whole.options())};
      return {[of = request, &inner]() mutable { return inner._reduce_scatter_base(of.outputs[0], of.inputs[0]); },
              compressed(request)};
    case Collective::all_reduce:
      request.type = ::c10d::OpType::ALLREDUCE;
      return {[of = request, &inner]() mutable { return inner.allreduce(of.outputs); }, compressed(request)};
    default:
      throw ArgumentError("collective: expected one that is rehearsed, got an exchange");
  }
}

AutoPolicy::Ways AutoPolicy::gathers(const Request& request, ::c10d::Backend& inner) {
  const auto exact = [request, &inner] {
    Request of = request;
    return inner._allgather_base(of.outputs[0], of.inputs[0]);
  };
  const auto compressed = [this, request](bool in_one_hop) {
    Request of = request;
    of.in_one_hop = in_one_hop;
    return calls_.launch(std::move(of));
  };
  if (!request.call.again) {
    Ways ways{exact, [=] { return compressed(false); }};
    if (may_take_one_hop(request.call)) ways.emplace_back([=] { return compressed(true); });
    return ways;
  }
  const at::Tensor& whole = request.outputs[0];
  const OperationPtr planned = make_operation(request, calls_.world(whole.device().type()));
  const auto secondary = std::make_shared<TensorSecondaryShard>();
  secondary->hold(
      at::empty({static_cast<std::int64_t>(planned->memory().secondary)}, whole.options().dtype(at::kByte)));
  const GatherPtr gather = std::dynamic_pointer_cast<Gather>(planned)->bound_to(secondary);
  Request once_more = request;
  once_more.inputs.clear();
  return {[=] {
            exact()->wait();
            return exact();
          },
          [=, this] {
            calls_.launch(Request(request), gather)->wait();
            return calls_.launch(Request(once_more), gather);
          }};
}

// Times a call that all ranks start together, with no other call of this group in progress.
std::int64_t AutoPolicy::time(const std::function<WorkPtr()>& start, const Call& call) {
  calls_.drain(kNoLimit);
  finish(device_of(call));
  inner_.cpu().barrier()->wait();
  const auto begun = std::chrono::steady_clock::now();
  start()->wait();
  finish(device_of(call));
  const auto taken = std::chrono::steady_clock::now() - begun;
  calls_.stats().withLock([&](Stats& stats) {
    for (int i = 0; i < (call.again ? 2 : 1); ++i) stats.rehearsals.add(call.num_bytes);
  });
  return std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
}

// Returns the element-wise maximum over all ranks.
std::vector<std::int64_t> AutoPolicy::largest(std::vector<std::int64_t> numbers) {
  std::vector<at::Tensor> tensors{at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong)};
  auto* agreed = static_cast<std::int64_t*>(tensors[0].data_ptr());
  std::copy(numbers.begin(), numbers.end(), agreed);
  ::c10d::AllreduceOptions options;
  options.reduceOp = ::c10d::ReduceOp::MAX;
  inner_.cpu().allreduce(tensors, options)->wait();
  return {agreed, agreed + numbers.size()};
}

void AutoPolicy::check_same_call(const Call& call) {
  const std::vector<std::int64_t> mine{static_cast<int>(call.collective), static_cast<int>(*call.dtype), call.num_bytes,
                                       call.again ? 1 : 0};
  std::vector<std::int64_t> both = mine;
  for (const std::int64_t number : mine) both.push_back(-number);
  const std::vector<std::int64_t> most = largest(both);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (most[i] != -most[mine.size() + i]) {
      throw Error("compress: expected the same call on all ranks, got an " + text_of(call) + " on rank " +
                  std::to_string(rank_));
    }
  }
}

}  // namespace zcomm::c10d_binding
