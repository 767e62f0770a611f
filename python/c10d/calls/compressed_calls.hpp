// Compressed calls of a group: their selection, execution and cost.
#pragma once

#include <array>

#include "auto_policy.hpp"
#include "c10d/job/call_hooks.hpp"
#include "c10d/job/flight_recorder.hpp"
#include "c10d/job/profiling.hpp"
#include "c10d/job/telemetry.hpp"
#include "options.hpp"
#include "planner.hpp"
#include "runners.hpp"

namespace zcomm::c10d_binding {

class CompressedCalls {
 public:
  using MakeTransport = std::function<std::unique_ptr<Transport>()>;
  // Calls each factory at the first compressed call of its device type. Borrows `group`, `inner`, `recorder` and
  // both kinds of hooks.
  CompressedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, MakeTransport host_transport,
                  MakeTransport device_transport, InnerGroups& inner, GroupRecorder& recorder, CallHooks& call_hooks,
                  const PythonHooks& hooks, std::shared_ptr<GroupErrors> errors);

  ~CompressedCalls() { host_runner_->leave_group(); }

  ::c10d::Backend& group() { return group_; }
  int size() const { return size_; }
  const ZcommOptions& options() const { return *options_; }
  SharedStats& stats() { return stats_; }
  Telemetry& telemetry() { return telemetry_; }
  AutoPolicy& auto_policy() { return auto_policy_; }
  std::uint64_t num_calls() const { return num_calls_; }  // of collectives
  // Stochastic rounding draws from this step and the number of calls since. Ends the last one.
  void set_step(std::uint64_t step) {
    step_ = step;
    calls_in_step_ = 0;
    auto_policy_.steps().end_step();
  }

  // Decides about a request, and in how many hops it goes. Throws if its policy is strict about it, or if the group has
  // failed on a GPU, because exact calls may use results of compressed ones. With Choice::automatic the first call of a
  // class blocks until all ranks reach it.
  Verdict decide(Request& request);
  void count(const Call& call, Verdict verdict);
  // Counts a collective outside of the policy. Throws if the group has failed on a GPU.
  void count_other(std::span<const at::Tensor> tensors);
  // The same for a message, which is no collective: not all ranks make it, so num_calls() leaves it out.
  void count_message(std::span<const at::Tensor> tensors);
  // Begins a compressed message. Returns its seed; throws as count_other().
  std::uint64_t begin_message();
  // Decides about a request and counts it. For one that is compressed, calls `check` on the arguments, which throws.
  template <class Check>
  bool compresses(Request& request, Check&& check) {
    request.verdict = decide(request);
    if (request.verdict == Verdict::compressed) check();
    count(request.call, request.verdict);
    return request.verdict == Verdict::compressed;
  }

  // Compares the ranks' options at the first call, and throws the difference. Thread-safe.
  const Topology& topology();
  // For the operations of calls on tensors of `device`.
  const World& world(at::DeviceType device);

  // Starts a request on the device of its tensors, with a planned operation if there is one. Keeps its work, too, while
  // calls are coalesced.
  WorkPtr launch(Request&& request, OperationPtr operation = {});

  // Drains both runners.
  bool drain(std::chrono::milliseconds limit) { return host_runner_->drain(limit) && device_runner_.drain(limit); }
  // Makes the current stream of a GPU wait for all calls so far.
  void join() { device_runner_.join(); }
  void drain_host() { host_runner_->drain(kNoLimit); }
  void abort() noexcept;
  void stop();

 private:
  // Throws if the group was shut down or has failed on a GPU.
  void check_open();
  std::uint64_t seed_of(std::uint64_t call_in_step) const;

  ::c10d::Backend& group_;
  const int rank_;
  const int size_;
  c10::intrusive_ptr<ZcommOptions> options_;
  InnerGroups& inner_;
  const PythonHooks& hooks_;
  const std::shared_ptr<GroupErrors> errors_;
  std::mutex topology_mutex_;  // guards the next two until ranks agree
  std::optional<World> host_world_;
  std::optional<World> device_world_;
  PlanCache plan_cache_;
  std::atomic<bool> is_agreed_{false};
  Profilers profilers_;
  Telemetry telemetry_;
  SharedStats stats_;
  const std::array<Observer*, 5> observers_;
  AutoPolicy auto_policy_;
  std::atomic<bool> is_closed_{false};
  std::atomic<std::uint64_t> num_calls_{0};
  std::atomic<std::uint64_t> step_{0};
  std::atomic<std::uint64_t> calls_in_step_{0};
  const std::shared_ptr<HostRunner> host_runner_;  // the last two: their threads use all fields above
  DeviceRunner device_runner_;
};

}  // namespace zcomm::c10d_binding
