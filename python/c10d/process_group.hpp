// The torch.distributed backend "zcomm".
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device_runner.hpp"
#include "host_runner.hpp"
#include "options.hpp"
#include "site.hpp"
#include "stats.hpp"
#include "telemetry.hpp"
#include "tensors.hpp"

namespace zcomm::c10d_binding {

using ::c10d::Work;
using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<Work>;

// What only Python can do: torch's own groups cannot be made in C++ outside of torch.
struct Host {
  // Compares options, versions and node layout with all ranks; returns the node of every rank. Called once, at the
  // first collective of the group.
  std::function<std::vector<int>()> agree;
  // The inner group for exact calls on "cuda" tensors. Called once, at the first one.
  std::function<BackendPtr()> make_exact_cuda;
  // A Gloo group for compressed bytes alone. Called once, at the first compressed collective on CPU tensors.
  std::function<BackendPtr()> make_transport_group;
  // Waits until all ranks have come to their first compressed collective on GPU tensors; returns where the NCCL of the
  // installed wheel is, or nothing. Called once.
  std::function<std::string()> meet_for_nccl;
  // A zcomm backend for `ranks` of this group.
  std::function<BackendPtr(StorePtr, const std::vector<int>& ranks, c10::intrusive_ptr<::c10d::Backend::Options>)>
      split;
  // Called once, when the group ends. May be empty.
  std::function<void()> at_shutdown;
};

// Of error feedback: the residual, its format, its decay, and whether it is empty.
using NamedFeedback = std::tuple<at::Tensor, std::string, float, bool>;

// Compresses the calls that its policy names, in order; hands every other call to an inner process group: `exact_cpu`,
// Gloo, or one of NCCL for tensors on a GPU.
class ProcessGroup final : public ::c10d::Backend {
 public:
  // `store` is the group's own; the keys "failure", "nccl/..." and those of `host` are used.
  ProcessGroup(BackendPtr exact_cpu, StorePtr store, c10::intrusive_ptr<ZcommOptions> options, Host host);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "zcomm"; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<ZcommOptions> options() const { return options_; }
  Stats& stats() { return stats_; }
  Telemetry& telemetry() { return telemetry_; }
  bool is_aborted() const { return aborted_; }
  bool has_ended() const { return ended_; }
  // By the options, or the override in force.
  bool is_strict() const;

  // Compressed where the policy says so. See process_group.cpp and coalesced.cpp.
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;

  // For callers that know what their tensors hold; see segmented.cpp. Of an all-gather of `input` in place in `output`,
  // or a reduce-scatter: the format that the policy in force has it go in, "exact" if it leaves it so. `format`, unless
  // it is empty, takes the place of the options', but not that of an override.
  std::string gather_format(const at::Tensor& output, const at::Tensor& input, const std::string& format);
  std::string reduce_format(const at::Tensor& output, const at::Tensor& input, const ::c10d::ReduceOp& op,
                            const std::string& formats);
  // `secondary` is filled; of `reference` see GatherExtras.
  WorkPtr all_gather_segments(at::Tensor output, at::Tensor input, const NamedSegments& segments,
                              const std::optional<at::Tensor>& secondary, const std::optional<at::Tensor>& reference,
                              const SitePtr& site, bool async);
  WorkPtr reduce_scatter_segments(at::Tensor output, at::Tensor input, const ::c10d::ReduceOp& op,
                                  const NamedSegments& segments, const std::optional<NamedFeedback>& feedback,
                                  const SitePtr& site, bool async);
  WorkPtr all_reduce_feedback(at::Tensor tensor, const ::c10d::ReduceOp& op, const std::string& formats,
                              const NamedFeedback& feedback, bool async);
  // Bytes of the residual of such a reduce-scatter, or all-reduce.
  std::size_t feedback_bytes(const at::Tensor& input, const NamedSegments& segments, const std::string& format);
  std::size_t all_reduce_feedback_bytes(const at::Tensor& tensor, const std::string& formats,
                                        const std::string& format);
  // "exact" as above, of an all-reduce.
  std::string all_reduce_format(const at::Tensor& tensor, const ::c10d::ReduceOp& op, const std::string& formats);
  // Bytes of this rank's secondary shard of such an all-gather, and of the largest one of all ranks.
  std::pair<std::size_t, std::size_t> secondary_bytes(const at::Tensor& output, const NamedSegments& segments);
  // `output` once more, from the secondary shards of all ranks of the node.
  WorkPtr gather_secondary(at::Tensor output, at::Tensor secondary, const NamedSegments& segments, const SitePtr& site,
                           bool async);

  // Stochastic rounding draws from the options' seed, this step, and the number of calls since.
  void set_step(std::uint64_t step) {
    step_ = step;
    calls_in_step_ = 0;
  }

  // Exact, always. See exact.cpp.
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const ::c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const ::c10d::AllToAllOptions& opts) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override;
  void eagerConnectSingleDevice(at::Device device) override;
  void setGroupUid(const std::string& uid) override;
  void setSequenceNumberForGroup() override;
  std::uint64_t getSequenceNumberForGroup() override { return sequence_number_; }
  void enableCollectivesTiming() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  ::c10d::ErrorType getError() override { return error_; }

 private:
  using Run = std::function<CallStats(Communicator&, StreamView)>;
  // What holds for one call, of its own options and the group's.
  struct Terms {
    Policy policy;
    std::chrono::milliseconds timeout;
    bool async;  // the caller goes on before it is done
  };
  template <class CallOptions>
  Terms terms_of(const CallOptions& opts) const {
    const bool own_timeout = opts.timeout != ::c10d::kUnsetTimeout && opts.timeout != kNoTimeout;
    return {effective_policy(options_->policy), own_timeout ? opts.timeout : options_->timeout,
            opts.asyncOp || coalescing_};
  }

  // What a caller says of its tensors. No segments: all travels as the policy has it.
  struct GatherCall {
    std::vector<Segment<BlockFormat>> segments;
    at::Tensor secondary;
    at::Tensor reference;
    SitePtr site;
  };
  struct ReduceCall {
    std::vector<Segment<HopFormats>> segments;
    std::optional<Feedback> feedback;
    at::Tensor residual;  // of the feedback, held
    SitePtr site;
  };
  // Once per group, before its first collective.
  void agree();
  // What becomes of `call`; throws if `policy` is strict about it.
  Verdict judge(const Policy& policy, const Call& call);
  void count(const Call& call, Verdict verdict);
  // True if `call` is to be compressed and its arguments pass `check`, which throws. Counts it.
  template <class Check>
  bool admit(const Policy& policy, const Call& call, Check&& check);
  // The same for the calls of a coalesced one: indices.
  struct Parts {
    std::vector<std::size_t> compressed;
    std::vector<std::size_t> exact;
  };
  template <class Check>
  Parts part(const Policy& policy, const std::vector<Call>& calls, Check&& check);
  WorkPtr combine(std::vector<WorkPtr> works);
  // The inner group for a tensor's device; while calls are coalesced it is told so.
  ::c10d::Backend& exact(at::DeviceType type);
  // call(inner group), tracked: a work of calls that NCCL coalesces comes at their end.
  template <class InnerCall>
  WorkPtr hand_over(at::DeviceType type, InnerCall&& call) {
    WorkPtr work = call(exact(type));
    return type == at::kCPU ? track(std::move(work)) : work;
  }
  template <class InnerCall>
  WorkPtr hand_over(const at::Tensor& tensor, InnerCall&& call) {
    return hand_over(tensor.device().type(), std::forward<InnerCall>(call));
  }
  ::c10d::Backend& exact_cuda();
  // Applies `visit` to the inner groups that are there.
  template <class Visit>
  void for_each_exact(Visit&& visit);
  // Gloo has no PREMUL_SUM: its exact path scales, then sums.
  static bool emulates(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
    return is_premul(op) && tensor.device().is_cpu();
  }
  // What the telemetry is to know of a call that is about to run.
  template <class Format>
  void sample(Collective collective, const SitePtr& site, at::Device device, std::span<const ConstTensorView> slots,
              std::span<const Segment<Format>> segments, Communicator& communicator, StreamView stream);
  // Starts `run` on the device of `outputs`.
  WorkPtr launch(Collective collective, ::c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
                 std::vector<at::Tensor> outputs, bool async, SitePtr site, Run run);
  WorkPtr launch_all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<TensorView> slots,
                            std::vector<at::Tensor> outputs, const Terms& terms, GatherCall call = {});
  WorkPtr launch_reduce_scatter(::c10d::OpType type, const at::Tensor& output, std::vector<TensorView> slots,
                                std::vector<at::Tensor> inputs, const ::c10d::ReduceOp& op, const Terms& terms,
                                ReduceCall call = {});
  WorkPtr launch_all_reduce(::c10d::OpType type, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                            const Terms& terms, ReduceCall call = {});
  std::unique_ptr<Communicator> connect_gloo();
  std::unique_ptr<Communicator> connect_nccl(at::Device device, const std::shared_ptr<Failure>& failure);
  std::size_t secondary_bytes_of(int rank, const at::Tensor& output, GatherSegments segments);
  ReduceCall with_feedback(const NamedFeedback& feedback, std::size_t num_bytes, const at::Tensor& like);
  void check_secondary(const at::Tensor& secondary, const at::Tensor& output, GatherSegments segments);
  void abort_compressed();
  std::string prefixed(const std::string& text) const;
  std::exception_ptr fail(const std::exception& error);
  // An exact collective outside of the policy: counts it.
  void pass(std::span<const at::Tensor> tensors);
  WorkPtr track(WorkPtr work);

  BackendPtr exact_cpu_;
  std::mutex exact_cuda_mutex_;
  BackendPtr exact_cuda_;  // made when it is needed
  StorePtr store_;
  c10::intrusive_ptr<ZcommOptions> options_;
  Host host_;
  Stats stats_;
  Telemetry telemetry_;

  std::mutex agree_mutex_;
  std::atomic<bool> agreed_{false};
  std::optional<Topology> topology_;

  std::atomic<std::uint64_t> sequence_number_{0};
  std::atomic<std::uint64_t> step_{0};
  std::atomic<std::uint64_t> calls_in_step_{0};
  std::atomic<::c10d::ErrorType> error_{::c10d::ErrorType::SUCCESS};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> ended_{false};
  std::once_flag shutdown_once_;
  bool coalescing_ = false;
  bool coalescing_cuda_ = false;  // the inner group has been told
  std::vector<WorkPtr> coalesced_;
  BackendPtr last_split_;
  std::string last_split_name_;
  HostRunner host_runner_;  // the last two: their threads use all of the above
  DeviceRunner device_runner_;
};

}  // namespace zcomm::c10d_binding
