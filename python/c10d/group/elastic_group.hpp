// Backend "zcomm" of a group whose members change: `init_process_group("zcomm", enable_reconfigure=True)`.
#pragma once

#include "process_group.hpp"

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14 and later

#include <mutex>

namespace zcomm::c10d_binding {

// Forwards all calls to a ProcessGroup of the present members, which reconfigure() replaces. For CPU tensors.
class ElasticGroup final : public ::c10d::Backend {
 public:
  using Group = c10::intrusive_ptr<ProcessGroup>;
  // Makes the group of the members that the options name, by Python. Calls `leave` once they are known to be valid.
  using Make = std::function<Group(const ::c10d::ReconfigureOptions&, const std::function<void()>& leave)>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  // `handle` names this member. Until the first reconfigure(), rank and size are those given here.
  ElasticGroup(int rank, int size, c10::intrusive_ptr<ZcommOptions> options, std::string handle, Make make);

  const std::string getBackendName() const override { return "zcomm"; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_->clone(); }

  bool supportsReconfigure() const override { return true; }
  ::c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle_; }
  // Aborts the calls of the present members, and connects the new ones. Blocks. Counters stay; plans, decisions and
  // splits end with the old members. Invalid options throw ValueError, and change nothing; after another exception all
  // calls fail until the next reconfigure(). Calls of it are sequential.
  WorkPtr reconfigure(const ::c10d::ReconfigureOptions& opts) override;
  // Returns null before the first reconfigure().
  Group members() const;

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override {
    return now()->allgather(outputs, inputs, opts);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override {
    return now()->_allgather_base(output, input, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override {
    return now()->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override {
    return now()->allgather_coalesced(outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override {
    return now()->reduce_scatter(outputs, inputs, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override {
    return now()->_reduce_scatter_base(output, input, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override {
    return now()->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override {
    return now()->allreduce(tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override {
    return now()->allreduce_coalesced(tensors, opts);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override {
    return now()->allreduce_sparse(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override { return now()->reduce(tensors, opts); }
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override {
    return now()->broadcast(tensors, opts);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override {
    return now()->gather(outputs, inputs, opts);
  }
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) override {
    return now()->gather_single(output, input, opts);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override {
    return now()->scatter(outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override {
    return now()->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override {
    return now()->alltoall(outputs, inputs, opts);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override { return now()->send(tensors, peer, tag); }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override { return now()->recv(tensors, peer, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return now()->recvAnysource(tensors, tag); }
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override { return now()->barrier(opts); }
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    now()->monitoredBarrier(opts, wait_all_ranks);
  }
  void startCoalescing() override { now()->startCoalescing(); }
  WorkPtr endCoalescing() override { return now()->endCoalescing(); }
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override {
    return now()->split(store, ranks, opts);
  }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return now()->getSequenceNumberForGroup(); }
  void waitForPendingWorks() override { now()->waitForPendingWorks(); }
  void enableCollectivesTiming() override { now()->enableCollectivesTiming(); }
  void setGroupUid(const std::string& uid) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  ::c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  Group now() const;

  c10::intrusive_ptr<ZcommOptions> options_;
  const std::string handle_;
  const Make make_;
  mutable std::mutex mutex_;  // guards the next one
  Group members_;
};

}  // namespace zcomm::c10d_binding

#endif
