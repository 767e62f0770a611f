// The calls that may be compressed.
#include "process_group.hpp"

#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d_transport.hpp"
#include "tensors.hpp"
#include "work.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

// Calls Python, whose exceptions become ours: what() of theirs would append a traceback.
template <class Result>
Result ask(const std::function<Result()>& host) {
  try {
    return host();
  } catch (pybind11::error_already_set& error) {
    const pybind11::gil_scoped_acquire gil;
    throw TransportError(pybind11::str(error.value()));
  }
}

}  // namespace

ProcessGroup::ProcessGroup(BackendPtr exact, StorePtr store, c10::intrusive_ptr<ZcommOptions> options, Host host)
    : Backend(exact->getRank(), exact->getSize()),
      exact_(std::move(exact)),
      store_(std::move(store)),
      options_(std::move(options)),
      host_(std::move(host)) {
  init();
}

void ProcessGroup::agree() {
  if (agreed_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(agree_mutex_);
  if (agreed_.load(std::memory_order_relaxed)) return;
  try {
    topology_.emplace(ask(host_.agree));
  } catch (const Error& error) {
    std::rethrow_exception(to_torch_error(error));
  }
  agreed_.store(true, std::memory_order_release);
}

Verdict ProcessGroup::judge(const Policy& policy, const Call& call) {
  agree();
  const Verdict verdict = decide(policy, call, getSize());
  enforce_strict(policy, call, verdict);
  return verdict;
}

void ProcessGroup::count(const Call& call, Verdict verdict) {
  stats_.calls(call.collective, verdict).add(call.num_bytes);
  ++sequence_number_;
}

template <class Check>
bool ProcessGroup::admit(const Policy& policy, const Call& call, Check&& check) {
  const Verdict verdict = judge(policy, call);
  if (verdict == Verdict::compressed) check();
  count(call, verdict);
  return verdict == Verdict::compressed;
}

Communicator& ProcessGroup::communicator() {
  if (!communicator_) {
    auto transport = std::make_unique<C10dTransport>(ask(host_.make_transport_group), store_);
    auto fresh = std::make_unique<Communicator>(std::move(transport), *topology_, make_cpu_codec(),
                                                make_host_workspace(), options_->chunk_bytes);
    const std::lock_guard lock(communicator_mutex_);
    communicator_ = std::move(fresh);
  }
  if (aborted_) communicator_->abort("because the group was aborted");
  return *communicator_;
}

std::exception_ptr ProcessGroup::to_torch_error(const std::exception& error) const {
  const std::string text =
      "zcomm, rank " + std::to_string(getRank()) + " of group '" + getGroupUid() + "': " + error.what();
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text));
}

WorkPtr ProcessGroup::launch(Collective collective, ::c10d::OpType type, const char* title,
                             std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs, bool async, Run run) {
  auto work = c10::make_intrusive<CompressedWork>(getRank(), type, title, std::move(inputs), std::move(outputs),
                                                  sequence_number_.load());
  set_num_threads(at::get_num_threads());
  // The task holds the group, so that no reference that a user drops can end it in the middle.
  const auto self = c10::intrusive_ptr<ProcessGroup>::unsafe_reclaim_from_nonowning(this);
  WorkQueue::Task task = [self, work, collective, run = std::move(run)]() -> std::function<void()> {
    std::exception_ptr error;
    try {
      self->stats_.compressed(collective).add(run(self->communicator()));
    } catch (const TimeoutError& caught) {
      self->error_ = ::c10d::ErrorType::TIMEOUT;
      error = self->to_torch_error(caught);
    } catch (const std::exception& caught) {
      self->error_ = ::c10d::ErrorType::COMM_ERROR;
      error = self->to_torch_error(caught);
    }
    return [work, error] { work->complete(error); };
  };
  const bool queued = queue_.push(std::move(task), !async);
  TORCH_CHECK(queued, "zcomm: the process group was shut down");
  return track(work);
}

WorkPtr ProcessGroup::launch_all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<TensorView> slots,
                                        std::vector<at::Tensor> outputs, const Terms& terms) {
  return launch(
      Collective::all_gather, type, "zcomm:all_gather", {input}, std::move(outputs), terms.async,
      [shard = view_of(input), views = std::move(slots), format = terms.policy.all_gather, timeout = terms.timeout](
          Communicator& communicator) { return communicator.all_gather(shard, views, format, timeout); });
}

WorkPtr ProcessGroup::launch_reduce_scatter(::c10d::OpType type, const at::Tensor& output,
                                            std::vector<TensorView> slots, std::vector<at::Tensor> inputs,
                                            double factor, const Terms& terms) {
  return launch(Collective::reduce_scatter, type, "zcomm:reduce_scatter", std::move(inputs), {output}, terms.async,
                [result = view_of(output), views = std::vector<ConstTensorView>(slots.begin(), slots.end()),
                 formats = terms.policy.reduce_scatter, factor = static_cast<float>(factor),
                 timeout = terms.timeout](Communicator& communicator) {
                  return communicator.reduce_scatter(views, result, formats, factor, timeout);
                });
}

WorkPtr ProcessGroup::launch_all_reduce(::c10d::OpType type, const at::Tensor& tensor, double factor,
                                        const Terms& terms) {
  return launch(Collective::all_reduce, type, "zcomm:all_reduce", {tensor}, {tensor}, terms.async,
                [view = view_of(tensor), formats = terms.policy.all_reduce, factor = static_cast<float>(factor),
                 timeout = terms.timeout](Communicator& communicator) {
                  return communicator.all_reduce(view, formats, factor, timeout);
                });
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  const Terms terms = terms_of(opts);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  if (!admit(terms.policy, call, [&] { check_shapes(output, input, getSize(), "output", "input"); })) {
    return track(exact_->_allgather_base(output, input, opts));
  }
  return launch_all_gather(::c10d::OpType::_ALLGATHER_BASE, input, slots_of(output, getSize()), {output}, terms);
}

WorkPtr ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const ::c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) return track(exact_->allgather(outputs, inputs, opts));  // refuses it
  const Terms terms = terms_of(opts);
  const Call call = describe(Collective::all_gather, Form::list, inputs[0], outputs[0]);
  if (!admit(terms.policy, call,
             [&] { check_list(outputs[0], inputs[0], getSize(), "output_tensors", "input_tensor"); })) {
    return track(exact_->allgather(outputs, inputs, opts));
  }
  return launch_all_gather(::c10d::OpType::ALLGATHER, inputs[0], views_of(outputs[0]), outputs[0], terms);
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::ReduceScatterOptions& opts) {
  const Terms terms = terms_of(opts);
  const std::optional<double> factor = factor_of(opts.reduceOp, getSize());
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, opts.reduceOp);
  if (!admit(terms.policy, call, [&] { check_shapes(input, output, getSize(), "input", "output"); })) {
    if (!is_premul(opts.reduceOp)) return track(exact_->_reduce_scatter_base(output, input, opts));
    at::Tensor product = scaled({input}, *factor)[0];
    return track(exact_->_reduce_scatter_base(output, product, as_sum(opts)));
  }
  return launch_reduce_scatter(::c10d::OpType::_REDUCE_SCATTER_BASE, output, slots_of(input, getSize()), {input},
                               *factor, terms);
}

WorkPtr ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                     const ::c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) return track(exact_->reduce_scatter(outputs, inputs, opts));
  const Terms terms = terms_of(opts);
  const std::optional<double> factor = factor_of(opts.reduceOp, getSize());
  const Call call = describe(Collective::reduce_scatter, Form::list, outputs[0], inputs[0], opts.reduceOp);
  if (!admit(terms.policy, call, [&] { check_list(inputs[0], outputs[0], getSize(), "input_list", "output"); })) {
    if (!is_premul(opts.reduceOp)) return track(exact_->reduce_scatter(outputs, inputs, opts));
    std::vector<std::vector<at::Tensor>> products{scaled(inputs[0], *factor)};
    return track(exact_->reduce_scatter(outputs, products, as_sum(opts)));
  }
  return launch_reduce_scatter(::c10d::OpType::REDUCE_SCATTER, outputs[0], views_of(inputs[0]), inputs[0], *factor,
                               terms);
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1) return track(exact_->allreduce(tensors, opts));
  const Terms terms = terms_of(opts);
  const std::optional<double> factor = factor_of(opts.reduceOp, getSize());
  const Call call = describe(Collective::all_reduce, Form::single, tensors[0], tensors, opts.reduceOp);
  if (!admit(terms.policy, call, [] {})) {
    if (!is_premul(opts.reduceOp)) return track(exact_->allreduce(tensors, opts));
    scale_in_place(tensors, *factor);
    return track(exact_->allreduce(tensors, as_sum(opts)));
  }
  return launch_all_reduce(::c10d::OpType::ALLREDUCE, tensors[0], *factor, terms);
}

}  // namespace zcomm::c10d_binding
