// The calls that may be compressed.
#include "process_group.hpp"

#include <ATen/Parallel.h>

#include "c10d_transport.hpp"
#include "work.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

std::optional<DType> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::float32;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kHalf:
      return DType::float16;
    default:
      return std::nullopt;
  }
}

TensorView view_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.numel(), dtype_of(tensor).value()};
}

template <class View>
std::vector<View> views_of(const std::vector<at::Tensor>& tensors) {
  std::vector<View> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) views.push_back(view_of(tensor));
  return views;
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous();
}

// The factor of a linear operation: factor * sum over ranks.
std::optional<float> factor_of(const ::c10d::ReduceOp& op, int size) {
  switch (op.op_) {
    case ::c10d::ReduceOp::SUM:
      return 1.0f;
    case ::c10d::ReduceOp::AVG:
      return 1.0f / static_cast<float>(size);
    case ::c10d::ReduceOp::PREMUL_SUM: {
      const auto* supplement = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<float>()
                                                 : static_cast<float>(supplement->double_factor);
    }
    default:
      return std::nullopt;
  }
}

// What the policy asks about: `whole` is the gathered, scattered or reduced tensor, given as its parts.
Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole) {
  Call call;
  call.collective = collective;
  call.form = form;
  call.dtype = dtype_of(shard);
  call.floating_point = at::isFloatingType(shard.scalar_type()) || at::isComplexType(shard.scalar_type());
  // torch hands over complex tensors as their real views.
  if (shard.is_view() && shard._base().is_complex()) call.dtype.reset();
  call.contiguous = is_dense(shard);
  for (const at::Tensor& part : whole) {
    call.num_bytes += part.layout() == at::kStrided ? static_cast<std::int64_t>(part.nbytes()) : 0;
    call.contiguous = call.contiguous && is_dense(part);
  }
  return call;
}

void check_shapes(const at::Tensor& whole, const at::Tensor& shard, int size, const char* whole_name,
                  const char* shard_name) {
  TORCH_CHECK_VALUE(whole.scalar_type() == shard.scalar_type(), "zcomm: ", whole_name, " has dtype ",
                    whole.scalar_type(), ", need that of ", shard_name, ", ", shard.scalar_type());
  TORCH_CHECK_VALUE(whole.numel() == shard.numel() * size, "zcomm: ", whole_name, " has ", whole.numel(),
                    " elements, need ", size, " times the ", shard.numel(), " of ", shard_name);
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& shard, int size, const char* list_name,
                const char* shard_name) {
  TORCH_CHECK_VALUE(list.size() == static_cast<std::size_t>(size), "zcomm: ", list_name, " has ", list.size(),
                    " tensors, need one for each of ", size, " ranks");
  for (const at::Tensor& tensor : list) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == shard.scalar_type() && tensor.numel() == shard.numel(),
                      "zcomm: ", list_name, " has a tensor of ", tensor.numel(), " ", tensor.scalar_type(), ", need ",
                      shard.numel(), " ", shard.scalar_type(), " as in ", shard_name);
  }
}

bool is_own_slot(const at::Tensor& output, const at::Tensor& input, int rank) {
  return static_cast<const char*>(input.data_ptr()) ==
         static_cast<const char*>(output.data_ptr()) + static_cast<std::size_t>(rank) * input.nbytes();
}

// Gloo has no PREMUL_SUM: the exact path scales, then sums.
bool is_premul(const ::c10d::ReduceOp& op) { return op.op_ == ::c10d::ReduceOp::PREMUL_SUM; }

template <class CallOptions>
CallOptions as_sum(CallOptions opts) {
  opts.reduceOp = ::c10d::ReduceOp::SUM;
  return opts;
}

std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& tensors, float factor) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(tensor * factor);
  return results;
}

void scale_in_place(std::vector<at::Tensor>& tensors, float factor) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& tensor : tensors) tensor.mul_(factor);
}

std::vector<at::Tensor> equal_slots(const at::Tensor& whole, int size) {
  if (whole.numel() == 0) return std::vector<at::Tensor>(static_cast<std::size_t>(size), whole);
  return whole.view({-1}).split(whole.numel() / size);
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
  topology_.emplace(host_.agree());
  agreed_.store(true, std::memory_order_release);
}

bool ProcessGroup::admit(const Policy& policy, const Call& call, const std::function<void()>& check) {
  agree();
  const Verdict verdict = decide(policy, call, getSize());
  enforce_strict(policy, call, verdict);
  if (verdict == Verdict::compressed && check) check();
  stats_.calls(call.collective, verdict).add(call.num_bytes);
  ++sequence_number_;
  return verdict == Verdict::compressed;
}

template <class CallOptions>
ProcessGroup::Terms ProcessGroup::terms_of(const CallOptions& opts) const {
  const bool own_timeout = opts.timeout != ::c10d::kUnsetTimeout && opts.timeout != kNoTimeout;
  return {effective_policy(options_->policy), own_timeout ? opts.timeout : options_->timeout,
          opts.asyncOp || coalescing_};
}

Communicator& ProcessGroup::communicator() {
  if (!communicator_) {
    auto transport = std::make_unique<C10dTransport>(host_.make_transport_group(), store_);
    auto fresh = std::make_unique<Communicator>(std::move(transport), *topology_, make_cpu_codec(),
                                                make_host_workspace(), options_->chunk_bytes);
    const std::lock_guard lock(communicator_mutex_);
    communicator_ = std::move(fresh);
  }
  if (aborted_) communicator_->abort("because abort() was called");
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
  const bool queued = queue_.push(
      [this, work, collective, run = std::move(run)] {
        std::exception_ptr error;
        try {
          stats_.compressed(collective).add(run(communicator()));
        } catch (const TimeoutError& caught) {
          error_ = ::c10d::ErrorType::TIMEOUT;
          error = to_torch_error(caught);
        } catch (const std::exception& caught) {
          error_ = ::c10d::ErrorType::COMM_ERROR;
          error = to_torch_error(caught);
        }
        work->complete(error);
      },
      !async);
  TORCH_CHECK(queued, "zcomm: the process group was shut down");
  return track(work);
}

WorkPtr ProcessGroup::launch_all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<at::Tensor> slots,
                                        std::vector<at::Tensor> outputs, const Terms& terms) {
  return launch(Collective::all_gather, type, "zcomm:all_gather", {input}, std::move(outputs), terms.async,
                [shard = view_of(input), views = views_of<TensorView>(slots), format = terms.policy.all_gather,
                 timeout = terms.timeout](Communicator& communicator) {
                  return communicator.all_gather(shard, views, format, timeout);
                });
}

WorkPtr ProcessGroup::launch_reduce_scatter(::c10d::OpType type, const at::Tensor& output,
                                            std::vector<at::Tensor> slots, std::vector<at::Tensor> inputs, float factor,
                                            const Terms& terms) {
  return launch(Collective::reduce_scatter, type, "zcomm:reduce_scatter", std::move(inputs), {output}, terms.async,
                [result = view_of(output), views = views_of<ConstTensorView>(slots),
                 formats = terms.policy.reduce_scatter, factor, timeout = terms.timeout](Communicator& communicator) {
                  return communicator.reduce_scatter(views, result, formats, factor, timeout);
                });
}

WorkPtr ProcessGroup::launch_all_reduce(::c10d::OpType type, const at::Tensor& tensor, float factor,
                                        const Terms& terms) {
  return launch(Collective::all_reduce, type, "zcomm:all_reduce", {tensor}, {tensor}, terms.async,
                [view = view_of(tensor), formats = terms.policy.all_reduce, factor, timeout = terms.timeout](
                    Communicator& communicator) { return communicator.all_reduce(view, formats, factor, timeout); });
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  const Terms terms = terms_of(opts);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  if (!admit(terms.policy, call, [&] { check_shapes(output, input, getSize(), "output", "input"); })) {
    return track(exact_->_allgather_base(output, input, opts));
  }
  return launch_all_gather(::c10d::OpType::_ALLGATHER_BASE, input, equal_slots(output, getSize()), {output}, terms);
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
  return launch_all_gather(::c10d::OpType::ALLGATHER, inputs[0], outputs[0], outputs[0], terms);
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::ReduceScatterOptions& opts) {
  const Terms terms = terms_of(opts);
  const std::optional<float> factor = factor_of(opts.reduceOp, getSize());
  Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1});
  call.linear = factor.has_value();
  if (!admit(terms.policy, call, [&] { check_shapes(input, output, getSize(), "input", "output"); })) {
    if (!is_premul(opts.reduceOp)) return track(exact_->_reduce_scatter_base(output, input, opts));
    at::Tensor product = scaled({input}, *factor)[0];
    return track(exact_->_reduce_scatter_base(output, product, as_sum(opts)));
  }
  return launch_reduce_scatter(::c10d::OpType::_REDUCE_SCATTER_BASE, output, equal_slots(input, getSize()), {input},
                               *factor, terms);
}

WorkPtr ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                     const ::c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) return track(exact_->reduce_scatter(outputs, inputs, opts));
  const Terms terms = terms_of(opts);
  const std::optional<float> factor = factor_of(opts.reduceOp, getSize());
  Call call = describe(Collective::reduce_scatter, Form::list, outputs[0], inputs[0]);
  call.linear = factor.has_value();
  if (!admit(terms.policy, call, [&] { check_list(inputs[0], outputs[0], getSize(), "input_list", "output"); })) {
    if (!is_premul(opts.reduceOp)) return track(exact_->reduce_scatter(outputs, inputs, opts));
    std::vector<std::vector<at::Tensor>> products{scaled(inputs[0], *factor)};
    return track(exact_->reduce_scatter(outputs, products, as_sum(opts)));
  }
  return launch_reduce_scatter(::c10d::OpType::REDUCE_SCATTER, outputs[0], inputs[0], inputs[0], *factor, terms);
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1) return track(exact_->allreduce(tensors, opts));
  const Terms terms = terms_of(opts);
  const std::optional<float> factor = factor_of(opts.reduceOp, getSize());
  Call call = describe(Collective::all_reduce, Form::single, tensors[0], tensors);
  call.linear = factor.has_value();
  if (!admit(terms.policy, call)) {
    if (!is_premul(opts.reduceOp)) return track(exact_->allreduce(tensors, opts));
    scale_in_place(tensors, *factor);
    return track(exact_->allreduce(tensors, as_sum(opts)));
  }
  return launch_all_reduce(::c10d::OpType::ALLREDUCE, tensors[0], *factor, terms);
}

// A coalesced call is compressed tensor by tensor; what stays exact goes out in one exact coalesced call.

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  const Terms terms = terms_of(opts);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zcomm: outputs has ", outputs.size(), " tensors, need the ",
                    inputs.size(), " of inputs");
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> exact_outputs;
  std::vector<at::Tensor> exact_inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (admit(terms.policy, describe(Collective::all_gather, Form::coalesced, inputs[i], {&outputs[i], 1}),
              [&] { check_shapes(outputs[i], inputs[i], getSize(), "output", "input"); })) {
      works.push_back(launch_all_gather(::c10d::OpType::COALESCED, inputs[i], equal_slots(outputs[i], getSize()),
                                        {outputs[i]}, terms));
    } else {
      exact_outputs.push_back(outputs[i]);
      exact_inputs.push_back(inputs[i]);
    }
  }
  if (!exact_inputs.empty()) {
    works.push_back(track(exact_->allgather_into_tensor_coalesced(exact_outputs, exact_inputs, opts)));
  }
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<CombinedWork>(getRank(), std::move(works));
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::ReduceScatterOptions& opts) {
  const Terms terms = terms_of(opts);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zcomm: outputs has ", outputs.size(), " tensors, need the ",
                    inputs.size(), " of inputs");
  const std::optional<float> factor = factor_of(opts.reduceOp, getSize());
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> exact_outputs;
  std::vector<at::Tensor> exact_inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Call call = describe(Collective::reduce_scatter, Form::coalesced, outputs[i], {&inputs[i], 1});
    call.linear = factor.has_value();
    if (admit(terms.policy, call, [&] { check_shapes(inputs[i], outputs[i], getSize(), "input", "output"); })) {
      works.push_back(launch_reduce_scatter(::c10d::OpType::COALESCED, outputs[i], equal_slots(inputs[i], getSize()),
                                            {inputs[i]}, *factor, terms));
    } else {
      exact_outputs.push_back(outputs[i]);
      exact_inputs.push_back(inputs[i]);
    }
  }
  if (!exact_inputs.empty()) {
    const bool premul = is_premul(opts.reduceOp);
    if (premul) exact_inputs = scaled(exact_inputs, *factor);
    works.push_back(
        track(exact_->reduce_scatter_tensor_coalesced(exact_outputs, exact_inputs, premul ? as_sum(opts) : opts)));
  }
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<CombinedWork>(getRank(), std::move(works));
}

WorkPtr ProcessGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                          const ::c10d::AllreduceCoalescedOptions& opts) {
  const Terms terms = terms_of(opts);
  const std::optional<float> factor = factor_of(opts.reduceOp, getSize());
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> exact_tensors;
  for (const at::Tensor& tensor : tensors) {
    Call call = describe(Collective::all_reduce, Form::coalesced, tensor, {&tensor, 1});
    call.linear = factor.has_value();
    if (admit(terms.policy, call)) {
      works.push_back(launch_all_reduce(::c10d::OpType::ALLREDUCE_COALESCED, tensor, *factor, terms));
    } else {
      exact_tensors.push_back(tensor);
    }
  }
  if (!exact_tensors.empty()) {
    const bool premul = is_premul(opts.reduceOp);
    if (premul) scale_in_place(exact_tensors, *factor);
    works.push_back(track(exact_->allreduce_coalesced(exact_tensors, premul ? as_sum(opts) : opts)));
  }
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<CombinedWork>(getRank(), std::move(works));
}

}  // namespace zcomm::c10d_binding
