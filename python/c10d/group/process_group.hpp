// Backend "zcomm" of torch.distributed.
#pragma once

#include "c10d/base/torch_version.hpp"
#include "c10d/calls/compressed_calls.hpp"
#include "c10d/calls/inner_groups.hpp"
#include "send_recv.hpp"

namespace zcomm::c10d_binding {

// Compresses the calls that its policy names, in order. Forwards all others to an inner process group: `exact_cpu`,
// which is Gloo, or NCCL for GPU tensors.
class ProcessGroup final : public ::c10d::Backend {
 public:
  ProcessGroup(BackendPtr exact_cpu, c10::intrusive_ptr<ZcommOptions> options, PythonHooks hooks);

  const std::string getBackendName() const override { return "zcomm"; }
  // Returns a copy, into which torch writes the options of a split.
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<ZcommOptions>(*options_);
  }
  c10::intrusive_ptr<ZcommOptions> options() const { return options_; }
  CompressedCalls& compressed() { return compressed_; }
  const SendRecv& messages() const { return messages_; }
  const GroupErrors& errors() const { return *errors_; }
  // Continues the counters of a group that this one replaces. Called before its first call.
  void take_counters(ProcessGroup& before);
  bool is_aborted() const { return errors_->is_aborted(); }
  // Gloo connections from a rank to another, for the compressed bytes of CPU tensors. All ranks set the same number,
  // before their first such call.
  void set_connections(int each_way);
  int connections() const { return connections_; }
  // Returns the options' value, or the override's in force.
  bool is_strict() const { return effective_policy(options_->policy, *this).strict; }

  // Calls that the policy may compress: see compressible.cpp, coalesced.cpp and exchanges.cpp.
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
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const ::c10d::GatherOptions& opts) override;
#if ZCOMM_HAS_GATHER_SINGLE
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const ::c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const ::c10d::AllToAllOptions& opts) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return messages_.move(::c10d::OpType::SEND, tensors, peer, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return messages_.move(::c10d::OpType::RECV, tensors, peer, tag);
  }
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override { return messages_.recv_any(tensors, tag); }

  // Calls that are always exact: see exact.cpp.
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // False without GPUs, as in Gloo: torch's coalescing block captures calls of other threads, and all later calls if it
  // raises.
  bool supportsCoalescing() const override { return at::hasCUDA(); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override { return messages_.end_coalescing(inner_.end_coalescing()); }
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override;
  void eagerConnectSingleDevice(at::Device device) override {
    inner_.for_device(device.type()).eagerConnectSingleDevice(device);
  }
  void setGroupUid(const std::string& uid) override;
  void setSequenceNumberForGroup() override {
    inner_.for_each([](::c10d::Backend& inner) { inner.setSequenceNumberForGroup(); });
  }
  std::uint64_t getSequenceNumberForGroup() override { return compressed_.num_calls(); }
  void enableCollectivesTiming() override {
    inner_.for_each([](::c10d::Backend& inner) { inner.enableCollectivesTiming(); });
  }
  void waitForPendingWorks() override { compressed_.drain(kNoLimit); }
  // Returns the exact group of GPU tensors, for functions that it alone has: `name` is in the error without a GPU.
  ::c10d::Backend& of_nccl(const char* name);
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return of_nccl("mem_allocator").getMemAllocator(); }
#if ZCOMM_HAS_SUSPEND
  // Of the exact group: zcomm's own communicator keeps its memory.
  void suspend() override { of_nccl("suspend").suspend(); }
  void resume() override { of_nccl("resume").resume(); }
  std::unordered_map<std::string, std::uint64_t> getMemoryStats() override {
    return of_nccl("memory_stats").getMemoryStats();
  }
#endif
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  ::c10d::ErrorType getError() override { return errors_->last(); }

 private:
  template <class CallOptions>
  std::chrono::milliseconds timeout_of(const CallOptions& opts) const {
    const bool own_timeout = opts.timeout != ::c10d::kUnsetTimeout && opts.timeout != kNoTimeout;
    return own_timeout ? opts.timeout : options_->timeout;
  }
  template <class CallOptions>
  Request request_of(Call call, ::c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                     const CallOptions& opts) const {
    Request request;
    request.call = std::move(call);
    request.type = type;
    request.settings = {effective_policy(options_->policy, *this), timeout_of(opts),
                        opts.asyncOp || inner_.is_coalescing()};
    request.inputs = std::move(inputs);
    request.outputs = std::move(outputs);
    if constexpr (requires { opts.reduceOp; }) request.op = opts.reduceOp;
    if constexpr (requires { opts.rootRank; }) request.root = static_cast<int>(opts.rootRank);
    return request;
  }
  // Makes a call compressed or, by exact(inner group), exactly, and counts it. Calls `check` on a compressed one.
  template <class Check, class Exact>
  C10_ALWAYS_INLINE WorkPtr enter(Request&& request, Check&& check, Exact&& exact) {
    if (!compressed_.compresses(request, check)) return inner_.forward(request, exact);
    return compressed_.launch(std::move(request));
  }
  // Makes several calls in one, of which each is compressed or not by itself. Calls check(i) for each compressed one,
  // before the first moves a byte; forward(inputs, outputs) makes all exact ones.
  template <class Check, class Forward>
  WorkPtr coalesced(const char* name, std::vector<Request> requests, const std::vector<at::Tensor>& outputs,
                    Check&& check, Forward&& forward);
  // Counts an exact collective outside of the policy, before it begins.
  void begin_exact(std::span<const at::Tensor> tensors);
  void abort_compressed();
  std::unique_ptr<Transport> make_host_transport();

  c10::intrusive_ptr<ZcommOptions> options_;
  PythonHooks hooks_;
  const std::shared_ptr<GroupErrors> errors_ = std::make_shared<GroupErrors>(getRank());
  GroupRecorder recorder_;
  CallHooks call_hooks_;
  InnerGroups inner_;
  std::once_flag shutdown_once_;
  BackendPtr last_split_;
  StorePtr last_split_store_;
  int connections_ = 1;
  bool is_connected_ = false;   // by make_host_transport()
  CompressedCalls compressed_;  // its threads use all fields above
  SendRecv messages_;
};

}  // namespace zcomm::c10d_binding
