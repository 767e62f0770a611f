// The calls that are never compressed, and the life of a group.
#include <torch/csrc/utils/pybind.h>

#include "process_group.hpp"
#include "work.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr std::chrono::seconds kShutdownLimit{5};

}  // namespace

void ProcessGroup::pass(std::span<const at::Tensor> tensors) {
  std::int64_t num_bytes = 0;
  for (const at::Tensor& tensor : tensors) num_bytes += static_cast<std::int64_t>(tensor.nbytes());
  stats_.others.add(num_bytes);
  ++sequence_number_;
}

WorkPtr ProcessGroup::track(WorkPtr work) {
  if (coalescing_ && work) coalesced_.push_back(work);
  return work;
}

WorkPtr ProcessGroup::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) {
  agree();
  pass(tensors);
  return track(exact_->broadcast(tensors, opts));
}

WorkPtr ProcessGroup::allreduce_sparse(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  agree();
  pass({});
  return track(exact_->allreduce_sparse(tensors, opts));
}

WorkPtr ProcessGroup::reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) {
  agree();
  pass(tensors);
  return track(exact_->reduce(tensors, opts));
}

WorkPtr ProcessGroup::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                          std::vector<at::Tensor>& inputs, const ::c10d::AllgatherOptions& opts) {
  agree();
  pass(inputs);
  return track(exact_->allgather_coalesced(outputs, inputs, opts));
}

WorkPtr ProcessGroup::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                             const ::c10d::GatherOptions& opts) {
  agree();
  pass(inputs);
  return track(exact_->gather(outputs, inputs, opts));
}

WorkPtr ProcessGroup::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                              const ::c10d::ScatterOptions& opts) {
  agree();
  pass(outputs);
  return track(exact_->scatter(outputs, inputs, opts));
}

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                    std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  agree();
  pass({&input, 1});
  return track(exact_->alltoall_base(output, input, output_splits, input_splits, opts));
}

WorkPtr ProcessGroup::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                               const ::c10d::AllToAllOptions& opts) {
  agree();
  pass(inputs);
  return track(exact_->alltoall(outputs, inputs, opts));
}

// Two ranks may talk before the others have said anything: no agreement here.
WorkPtr ProcessGroup::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  pass(tensors);
  return track(exact_->send(tensors, peer, tag));
}

WorkPtr ProcessGroup::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  pass(tensors);
  return track(exact_->recv(tensors, peer, tag));
}

WorkPtr ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  pass(tensors);
  return track(exact_->recvAnysource(tensors, tag));
}

WorkPtr ProcessGroup::barrier(const ::c10d::BarrierOptions& opts) {
  agree();
  pass({});
  queue_.drain();  // a barrier comes after all that was called before it
  return track(exact_->barrier(opts));
}

void ProcessGroup::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  pass({});
  queue_.drain();
  exact_->monitoredBarrier(opts, wait_all_ranks);
}

// Gloo has no groups of calls: each call starts at once, and the caller gets one work for all of them.
void ProcessGroup::startCoalescing() {
  coalesced_.clear();  // torch does not end a block that raised
  coalescing_ = true;
}

WorkPtr ProcessGroup::endCoalescing() {
  TORCH_CHECK(coalescing_, "zcomm: endCoalescing was called without startCoalescing");
  coalescing_ = false;
  return c10::make_intrusive<CombinedWork>(getRank(), std::exchange(coalesced_, {}));
}

BackendPtr ProcessGroup::split(const StorePtr& store, const std::vector<int>& ranks,
                               const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  // torch asks once for each device type and means the same child.
  if (last_split_ && opts && opts->group_name == last_split_name_) return last_split_;
  BackendPtr child = host_.split(store, ranks, opts);
  last_split_ = child;
  last_split_name_ = opts ? opts->group_name : "";
  return child;
}

void ProcessGroup::eagerConnectSingleDevice(at::Device device) { exact_->eagerConnectSingleDevice(device); }

void ProcessGroup::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  exact_->setGroupUid(uid);
}

void ProcessGroup::setSequenceNumberForGroup() { exact_->setSequenceNumberForGroup(); }

void ProcessGroup::registerOnCompletionHook(std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) {
  exact_->registerOnCompletionHook(std::move(hook));
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  exact_->setTimeout(timeout);
}

void ProcessGroup::abort() {
  abort_compressed();
  exact_->abort();
  shutdown();
}

void ProcessGroup::abort_compressed() {
  aborted_ = true;
  const std::lock_guard lock(communicator_mutex_);
  if (communicator_) communicator_->abort("because the group was aborted");
}

void ProcessGroup::shutdown() {
  // Calls that no peer answers must not keep a process that is about to end.
  if (!aborted_ && !queue_.drain(kShutdownLimit)) abort_compressed();
  queue_.stop();
  last_split_.reset();
  std::call_once(shutdown_once_, [this] {
    if (host_.at_shutdown) host_.at_shutdown();
    without_gil([this] { exact_->shutdown(); });
  });
}

ProcessGroup::~ProcessGroup() { queue_.stop(); }

}  // namespace zcomm::c10d_binding
