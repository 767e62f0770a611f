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

::c10d::Backend& ProcessGroup::exact(at::DeviceType type) {
  if (type == at::kCPU) return *exact_cpu_;
  TORCH_CHECK_VALUE(type == at::kCUDA, "zcomm: got a tensor on ", type, ", need one on cpu or cuda");
  ::c10d::Backend& inner = exact_cuda();
  if (coalescing_ && !coalescing_cuda_) {
    inner.startCoalescing();
    coalescing_cuda_ = true;
  }
  return inner;
}

WorkPtr ProcessGroup::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) {
  agree();
  pass(tensors);
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
}

WorkPtr ProcessGroup::allreduce_sparse(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  agree();
  pass({});
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr ProcessGroup::reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) {
  agree();
  pass(tensors);
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.reduce(tensors, opts); });
}

WorkPtr ProcessGroup::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                          std::vector<at::Tensor>& inputs, const ::c10d::AllgatherOptions& opts) {
  agree();
  pass(inputs);
  return hand_over(inputs[0], [&](::c10d::Backend& inner) { return inner.allgather_coalesced(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                             const ::c10d::GatherOptions& opts) {
  agree();
  pass(inputs);
  return hand_over(inputs[0], [&](::c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                              const ::c10d::ScatterOptions& opts) {
  agree();
  pass(outputs);
  return hand_over(outputs[0], [&](::c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                    std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  agree();
  pass({&input, 1});
  return hand_over(input, [&](::c10d::Backend& inner) {
    return inner.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WorkPtr ProcessGroup::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                               const ::c10d::AllToAllOptions& opts) {
  agree();
  pass(inputs);
  return hand_over(inputs[0], [&](::c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
}

// Two ranks may talk before the others have said anything: no agreement here.
WorkPtr ProcessGroup::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  pass(tensors);
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.send(tensors, peer, tag); });
}

WorkPtr ProcessGroup::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  pass(tensors);
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.recv(tensors, peer, tag); });
}

WorkPtr ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  pass(tensors);
  return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.recvAnysource(tensors, tag); });
}

WorkPtr ProcessGroup::barrier(const ::c10d::BarrierOptions& opts) {
  agree();
  pass({});
  host_runner_.drain(kNoLimit);  // a barrier comes after all that was called before it
  const bool on_gpu = opts.device ? opts.device->is_cuda() : !opts.device_ids.empty();
  return track(exact(on_gpu ? at::kCUDA : at::kCPU).barrier(opts));
}

void ProcessGroup::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  pass({});
  host_runner_.drain(kNoLimit);
  exact_cpu_->monitoredBarrier(opts, wait_all_ranks);
}

// NCCL's calls become one; Gloo has no groups of calls, and compressed ones start at once. The caller gets one work for
// all of them.
void ProcessGroup::startCoalescing() {
  coalesced_.clear();  // torch does not end a block that raised
  if (coalescing_cuda_) exact_cuda().endCoalescing();
  coalescing_cuda_ = false;
  coalescing_ = true;
}

WorkPtr ProcessGroup::endCoalescing() {
  TORCH_CHECK(coalescing_, "zcomm: endCoalescing was called without startCoalescing");
  coalescing_ = false;
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  if (std::exchange(coalescing_cuda_, false)) {
    if (WorkPtr work = exact_cuda().endCoalescing()) works.push_back(std::move(work));
  }
  return c10::make_intrusive<CombinedWork>(getRank(), std::move(works));
}

BackendPtr ProcessGroup::split(const StorePtr& store, const std::vector<int>& ranks,
                               const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  // torch asks once for each device type and means the same child. A child that has ended had a name that is free
  // again.
  const auto* last = dynamic_cast<const ProcessGroup*>(last_split_.get());
  if (last != nullptr && !last->has_ended() && opts && opts->group_name == last_split_name_) return last_split_;
  BackendPtr child = host_.split(store, ranks, opts);
  last_split_ = child;
  last_split_name_ = opts ? opts->group_name : "";
  return child;
}

void ProcessGroup::eagerConnectSingleDevice(at::Device device) {
  exact(device.type()).eagerConnectSingleDevice(device);
}

template <class Visit>
void ProcessGroup::for_each_exact(Visit&& visit) {
  visit(*exact_cpu_);
  BackendPtr cuda;
  {
    const std::lock_guard lock(exact_cuda_mutex_);
    cuda = exact_cuda_;
  }
  if (cuda) visit(*cuda);
}

void ProcessGroup::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  for_each_exact([&](::c10d::Backend& inner) { inner.setGroupUid(uid); });
}

void ProcessGroup::setSequenceNumberForGroup() {
  for_each_exact([](::c10d::Backend& inner) { inner.setSequenceNumberForGroup(); });
}

void ProcessGroup::enableCollectivesTiming() {
  for_each_exact([](::c10d::Backend& inner) { inner.enableCollectivesTiming(); });
}

void ProcessGroup::registerOnCompletionHook(std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) {
  exact_cpu_->registerOnCompletionHook(std::move(hook));
}

void ProcessGroup::waitForPendingWorks() {
  host_runner_.drain(kNoLimit);
  without_gil([this] { device_runner_.drain(kNoLimit); });
}

std::shared_ptr<c10::Allocator> ProcessGroup::getMemAllocator() {
  return exact_cuda().getMemAllocator();  // Gloo has none
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  for_each_exact([&](::c10d::Backend& inner) { inner.setTimeout(timeout); });
}

void ProcessGroup::abort() {
  abort_compressed();
  for_each_exact([](::c10d::Backend& inner) { inner.abort(); });
  shutdown();
}

void ProcessGroup::abort_compressed() {
  aborted_ = true;
  host_runner_.abort("because the group was aborted");
  device_runner_.abort("because the group was aborted");
}

void ProcessGroup::shutdown() {
  // Calls that no peer answers must not keep a process that is about to end.
  if (!aborted_ && !host_runner_.drain(kShutdownLimit)) abort_compressed();
  without_gil([this] {
    if (!aborted_ && !device_runner_.drain(kShutdownLimit)) abort_compressed();
    device_runner_.stop();
  });
  host_runner_.stop();
  last_split_.reset();
  ended_ = true;
  std::call_once(shutdown_once_, [this] {
    if (host_.at_shutdown) host_.at_shutdown();
    without_gil([this] { for_each_exact([](::c10d::Backend& inner) { inner.shutdown(); }); });
  });
}

ProcessGroup::~ProcessGroup() {
  host_runner_.stop();
  without_gil([this] { device_runner_.stop(); });
}

}  // namespace zcomm::c10d_binding
