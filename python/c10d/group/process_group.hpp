// Backend "zcomm" of torch.distributed.
#pragma once

#include "c10d/calls/compressed_calls.hpp"
#include "c10d/calls/inner_groups.hpp"
#include "send_recv.hpp"

namespace zcomm::c10d_binding {

class C10dTransport;

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
  bool is_aborted() const { return errors_->is_aborted(); }
  // Sends the compressed bytes of later calls of CPU tensors over `each_way` Gloo connections from a rank to another.
  // Waits for all earlier calls, and for all ranks, which call this after the same calls. There has been one.
  void set_connections(int each_way);
  int connections() const { return connections_; }
  // Returns the options' value, or the override's in force.
  bool is_strict() const { return effective_policy(options_->policy).strict; }

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

  // Without GPUs no, as Gloo: a block of torch's takes other threads' calls along, and if it raises all later ones.
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
  // Gloo has none.
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner_.cuda().getMemAllocator(); }
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
  CallSettings settings_of(const CallOptions& opts) const {
    return {effective_policy(options_->policy, this), timeout_of(opts), opts.asyncOp || inner_.is_coalescing()};
  }
  // Tells whether `policy` names this group as one in which compiled graphs gather weights and reduce gradients.
  bool is_traced(const Policy& policy) const { return names_group(policy.forms.traced, getGroupDesc()); }
  // Makes several calls in one, of which each is compressed or not by itself. Calls check(i) for each compressed one,
  // before the first moves a byte, and launches job_of(i); forward(indices) makes all exact ones.
  template <class Check, class JobOf, class Forward>
  WorkPtr coalesced(const Policy& policy, const std::vector<Call>& calls, const std::vector<at::Tensor>& outputs,
                    Check&& check, JobOf&& job_of, Forward&& forward);
  // Counts an exact collective outside of the policy, before it begins.
  void begin_exact(std::span<const at::Tensor> tensors);
  void abort_compressed();
  std::unique_ptr<Transport> make_host_transport();

  c10::intrusive_ptr<ZcommOptions> options_;
  PythonHooks hooks_;
  const std::shared_ptr<GroupErrors> errors_ = std::make_shared<GroupErrors>(getRank());
  GroupRecorder recorder_;
  InnerGroups inner_;
  std::once_flag shutdown_once_;
  BackendPtr last_split_;
  StorePtr last_split_store_;
  int connections_ = 1;
  C10dTransport* host_transport_ = nullptr;  // once there has been a call; lives in compressed_
  CompressedCalls compressed_;               // its threads use all fields above
  SendRecv messages_;
};

}  // namespace zcomm::c10d_binding
