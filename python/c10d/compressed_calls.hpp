// The calls of a group that are compressed: which they are, how they run, and what they have cost.
#pragma once

#include "auto_policy.hpp"
#include "compressed_jobs.hpp"
#include "device_runner.hpp"
#include "flight_recorder.hpp"
#include "handshake.hpp"
#include "host_runner.hpp"
#include "options.hpp"
#include "stats.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {

// What holds for one call, of its own options and the group's.
struct CallSettings {
  Policy policy;
  std::chrono::milliseconds timeout;
  bool async;              // the call returns before it is complete
  bool rehearsal = false;  // see AutoPolicy: counted apart, never sampled, and it draws none of a step's seeds
};

// What a caller says of its tensors. No plan: all is sent as the policy has it.
struct GatherCall {
  std::shared_ptr<const GatherPlan> plan;
  at::Tensor secondary;
  at::Tensor reference;
  SitePtr site;
};
struct DifferenceCall {
  std::shared_ptr<const DifferencePlan> plan;
  HeldShardsPtr held;
  SitePtr site;
};
// One of those that are prepared together: the values of `call.held`'s next gather.
struct DifferenceShard {
  at::Tensor input;
  DifferenceCall call;
};
struct ReduceCall {
  std::shared_ptr<const ReducePlan> plan;
  std::shared_ptr<const AllReducePlan> all_reduce_plan;
  std::optional<Feedback> feedback;
  at::Tensor residual;  // of the feedback, held
  SitePtr site;
  bool direct = false;  // where there is no plan
};

// How bytes come to other ranks: one transport for each device type, made at its first compressed call.
struct TransportFactories {
  std::function<std::unique_ptr<Transport>()> host;
  // Sets what goes wrong with transfers later in the Failure.
  std::function<std::unique_ptr<Transport>(const std::shared_ptr<Failure>&)> device;
};

class CompressedCalls {
 public:
  // Of `group`, which outlives this, as do `inner`, `recorder`, `handshake`, `hooks` and `errors`.
  CompressedCalls(::c10d::Backend& group, c10::intrusive_ptr<ZcommOptions> options, TransportFactories transports,
                  InnerGroups& inner, GroupRecorder& recorder, Handshake& handshake, const PythonHooks& hooks,
                  GroupErrors& errors);

  Stats& stats() { return stats_; }
  Telemetry& telemetry() { return telemetry_; }
  const AutoPolicy& auto_policy() const { return auto_policy_; }
  std::uint64_t num_calls() const { return num_calls_; }
  // Stochastic rounding draws from the options' seed, this step, and the number of calls since.
  void set_step(std::uint64_t step) {
    step_ = step;
    calls_in_step_ = 0;
  }

  // What becomes of `call`; throws if `policy` is strict about it, or if the group has failed on a GPU: exact calls may
  // be about what came of compressed ones. With Choice::automatic the first call of a class blocks until all ranks
  // have made it.
  Verdict decide(const Policy& policy, const Call& call);
  void count(const Call& call, Verdict verdict);
  // A collective outside of the policy. Throws if the group has failed on a GPU.
  void count_other(std::span<const at::Tensor> tensors);
  // Who carries out `call`. Unless that is the inner group its arguments must pass `check`, which throws. Counts it.
  template <class Check>
  Route route(const Policy& policy, const Call& call, Check&& check) {
    const Verdict verdict = decide(policy, call);
    const Route route = route_of(policy, call, verdict);
    if (route != Route::inner) check();
    count(call, verdict);
    if (route == Route::direct) stats_.direct_reduce_scatter.calls.add(call.num_bytes);
    return route;
  }
  // The same for the calls of a coalesced one: indices.
  struct Parts {
    std::vector<std::size_t> compressed;
    std::vector<std::size_t> exact;
  };
  Parts partition(const Policy& policy, const std::vector<Call>& calls, const std::function<void(std::size_t)>& check);

  const Topology& topology() { return handshake_.topology(); }
  // As Choice::automatic has found of the class of an all-gather.
  bool is_one_hop(const Policy& policy, const Call& call) const {
    return policy.choice == Choice::automatic && auto_policy_.is_one_hop(policy, call);
  }
  // What a call on tensors of `device` will do. Counted.
  std::shared_ptr<const GatherPlan> plan_gather(at::DeviceType device, SlotShape slots,
                                                const std::vector<Segment<BlockFormat>>& segments, bool one_hop);
  std::shared_ptr<const DifferencePlan> plan_differences(at::DeviceType device, const SlotShape& slots);
  std::shared_ptr<const ReducePlan> plan_reduce(at::DeviceType device, SlotShape slots,
                                                const std::vector<Segment<HopFormats>>& segments,
                                                std::optional<BlockFormat> feedback = {});
  std::shared_ptr<const AllReducePlan> plan_all_reduce(at::DeviceType device, TensorView tensor, HopFormats formats,
                                                       std::optional<BlockFormat> feedback = {});

  // Start the collectives of zcomm/collectives.hpp on the device of their tensors.
  WorkPtr all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<TensorView> slots,
                     std::vector<at::Tensor> outputs, const CallSettings& settings, GatherCall call = {});
  WorkPtr gather_secondary(const at::Tensor& secondary, std::vector<TensorView> slots, const at::Tensor& output,
                           const CallSettings& settings, GatherCall call);
  // Without an input: once more, from what is held.
  WorkPtr gather_differences(const std::optional<at::Tensor>& input, std::vector<TensorView> slots,
                             const at::Tensor& output, const CallSettings& settings, DifferenceCall call);
  // On a GPU: ahead of their gathers, with one wait of the host for all.
  WorkPtr prepare_differences(const std::vector<DifferenceShard>& shards, const CallSettings& settings);
  WorkPtr reduce_scatter(::c10d::OpType type, const at::Tensor& output, const std::vector<TensorView>& slots,
                         std::vector<at::Tensor> inputs, const ::c10d::ReduceOp& op, const CallSettings& settings,
                         ReduceCall call = {});
  WorkPtr all_reduce(::c10d::OpType type, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                     const CallSettings& settings, ReduceCall call = {});

  // As Runner's, of both runners.
  bool drain(std::chrono::milliseconds limit) { return host_runner_.drain(limit) && device_runner_.drain(limit); }
  void drain_host() { host_runner_.drain(kNoLimit); }
  void abort(const std::string& reason) noexcept;
  void stop();

 private:
  std::size_t chunk_bytes(at::DeviceType device) const;
  std::unique_ptr<Communicator> make_communicator(at::DeviceType device, std::unique_ptr<Transport> transport,
                                                  std::unique_ptr<Codec> codec, std::unique_ptr<Workspace> workspace);
  WorkPtr launch(Stats::Compressed& cost, ::c10d::OpType type, const CallSettings& settings, SitePtr site,
                 std::unique_ptr<CompressedJob> job);

  const ::c10d::Backend& group_;
  const int rank_;
  const int size_;
  c10::intrusive_ptr<ZcommOptions> options_;
  TransportFactories transports_;
  GroupRecorder& recorder_;
  Handshake& handshake_;
  Stats stats_;
  Telemetry telemetry_;
  Telemetry no_telemetry_{0};  // of rehearsals
  AutoPolicy auto_policy_;
  std::atomic<std::uint64_t> num_calls_{0};
  std::atomic<std::uint64_t> step_{0};
  std::atomic<std::uint64_t> calls_in_step_{0};
  HostRunner host_runner_;  // the last two: their threads use all of the above
  DeviceRunner device_runner_;
};

}  // namespace zcomm::c10d_binding
