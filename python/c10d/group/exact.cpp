// Calls that are never compressed, and the lifetime of a group.
#include "c10d/base/tensors.hpp"
#include "c10d/calls/nccl_rendezvous.hpp"
#include "c10d/transport/c10d_transport.hpp"
#include "process_group.hpp"
#include "zcomm/checked_transport.hpp"

namespace zcomm::c10d_binding {

ProcessGroup::ProcessGroup(BackendPtr exact_cpu, c10::intrusive_ptr<ZcommOptions> options, PythonHooks hooks)
    : Backend(exact_cpu->getRank(), exact_cpu->getSize()),
      options_(std::move(options)),
      hooks_(std::move(hooks)),
      recorder_(*this, options_->global_ranks_in_group),
      call_hooks_(*this),
      inner_(std::move(exact_cpu), hooks_.make_exact_cuda, recorder_, call_hooks_),
      compressed_(
          *this, options_, [this] { return make_host_transport(); },
          [this] { return connect_nccl(*this, hooks_, *options_, compressed_.topology(), errors_); }, inner_, recorder_,
          call_hooks_, hooks_, errors_),
      messages_(*this, options_, inner_, compressed_, hooks_.message_store, *errors_) {
  errors_->on_first([](const std::string& group, const std::string& error) { CallHooks::abort(group, error); });
  init();
}

std::unique_ptr<Transport> ProcessGroup::make_host_transport() {
  auto [group, num_connections, store] = call_python(hooks_.make_transport_group, connections_);
  std::string why_not;
  const Topology& topology = compressed_.topology();
  auto memory =
      NodeMemory::meet(store, topology, getRank(), options_->timeout, [this] { return is_aborted(); }, why_not);
  const std::string before = compressed_.stats().withLock(
      [&](Stats& stats) { return std::exchange(stats.node_memory, memory ? "shared" : why_not); });
  if (!memory && !NodeMemory::is_expected(why_not) && before.empty() && topology.local_rank(getRank()) == 0)
    hooks_.no_node_memory(why_not);
  is_connected_ = true;
  std::unique_ptr<Transport> made =
      std::make_unique<C10dTransport>(std::move(group), num_connections, std::move(store), std::move(memory));
  if (options_->verify == Verify::none) return made;
  return make_checked_transport(std::move(made), options_->verify == Verify::all ? 1 : kVerifiedEvery);
}

void ProcessGroup::set_connections(int each_way) {
  compressed_.drain_host();
  TORCH_CHECK_VALUE(!is_connected_ || each_way == connections_, "connections: expected ", connections_,
                    ", which the group has since its first compressed call, got ", each_way);
  connections_ = each_way;
}

void ProcessGroup::take_counters(ProcessGroup& before) {
  Stats stats = before.compressed_.stats().withLock([](const Stats& counted) { return counted; });
  stats.node_memory.clear();
  compressed_.stats().withLock([&](Stats& now) { now = std::move(stats); });
  errors_->count_corrupted(before.errors_->num_corrupted());
}

void ProcessGroup::begin_exact(std::span<const at::Tensor> tensors) {
  compressed_.topology();
  compressed_.count_other(tensors);
}

WorkPtr ProcessGroup::allreduce_sparse(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  check_any(tensors, "tensors");
  begin_exact({});
  const RecordedCall recorded = recorded_call("all_reduce", {}, {}, timeout_of(opts));
  return inner_.forward({recorded, tensors[0].device(), tensors, tensors},
                        [&](::c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr ProcessGroup::reduce(std::vector<at::Tensor>& tensors, const ::c10d::ReduceOptions& opts) {
  check_one(tensors);
  if (getSize() > 1) check_no_gaps(tensors[0]);
  begin_exact(tensors);
  const RecordedCall recorded = recorded_call("reduce", tensors, tensors, timeout_of(opts));
  return inner_.forward({recorded, tensors[0].device(), tensors, tensors},
                        [&](::c10d::Backend& inner) { return inner.reduce(tensors, opts); });
}

WorkPtr ProcessGroup::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                          std::vector<at::Tensor>& inputs, const ::c10d::AllgatherOptions& opts) {
  check_any(inputs, "inputs");
  begin_exact(inputs);
  RecordedCall recorded = recorded_call("all_gather_into_tensor_coalesced", inputs, {}, timeout_of(opts));
  recorded.out_elements = recorded.in_elements * getSize();
  std::vector<at::Tensor> all;
  for (const auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
  return inner_.forward({recorded, inputs[0].device(), inputs, all},
                        [&](::c10d::Backend& inner) { return inner.allgather_coalesced(outputs, inputs, opts); });
}

WorkPtr ProcessGroup::barrier(const ::c10d::BarrierOptions& opts) {
  begin_exact({});
  compressed_.drain_host();  // a barrier follows all earlier calls
  // torch passes numbers of devices, or CUDA devices if it was built with CUDA, also in a job on CPUs.
  const bool on_gpu = has_gpu() && (opts.device ? opts.device->is_cuda() : !opts.device_ids.empty());
  if (on_gpu) compressed_.join();
  const at::DeviceType type = on_gpu ? at::kCUDA : at::kCPU;
  const RecordedCall recorded = recorded_call("all_reduce_barrier", {}, {}, timeout_of(opts));
  return inner_.forward({recorded, type}, [&](::c10d::Backend& inner) { return inner.barrier(opts); });
}

void ProcessGroup::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  compressed_.count_other({});
  compressed_.drain_host();
  inner_.cpu().monitoredBarrier(opts, wait_all_ranks);
}

::c10d::Backend& ProcessGroup::of_nccl(const char* name) {
  TORCH_CHECK(has_gpu(), name, ": not supported by the backend 'zcomm' on CPUs: it is NCCL's, and there is no GPU");
  return inner_.cuda();
}

void ProcessGroup::startCoalescing() {
  messages_.start_coalescing();
  inner_.start_coalescing();
}

BackendPtr ProcessGroup::split(const StorePtr& store, const std::vector<int>& ranks,
                               const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  // Returns the same child for each device type: torch asks once per type, with the same store.
  if (!last_split_ || store != last_split_store_) {
    last_split_ = hooks_.split(store, ranks, opts);
    last_split_store_ = store;
  }
  return last_split_;
}

void ProcessGroup::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  errors_->set_group_uid(uid);
  inner_.set_group_uid(uid);
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  inner_.for_each([&](::c10d::Backend& inner) { inner.setTimeout(timeout); });
}

void ProcessGroup::abort() {
  abort_compressed();
  inner_.for_each([](::c10d::Backend& inner) { inner.abort(); });
  shutdown();
}

void ProcessGroup::abort_compressed() {
  errors_->set_aborted();
  compressed_.abort();
  errors_->announce();
}

void ProcessGroup::shutdown() {
  // Aborts calls that no peer answers, so that they do not hold up the end of the process.
  constexpr std::chrono::seconds kPatience{5};
  if (!is_aborted() && !compressed_.drain(kPatience)) abort_compressed();
  compressed_.stop();
  last_split_.reset();
  std::call_once(shutdown_once_, [this] {
    if (hooks_.at_shutdown) hooks_.at_shutdown();
    const WithoutGil no_gil;
    inner_.for_each([](::c10d::Backend& inner) { inner.shutdown(); });
  });
}

}  // namespace zcomm::c10d_binding
