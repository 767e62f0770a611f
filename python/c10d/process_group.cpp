// The calls that may be compressed.
#include "process_group.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "c10d_transport.hpp"
#include "tensors.hpp"
#include "torch_workspace.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kNcclIdKey = "nccl/unique_id";
constexpr const char* kNcclFailureKey = "nccl/failure";

at::DeviceType first_device(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::kCPU : tensors[0].device().type();
}

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

ProcessGroup::ProcessGroup(BackendPtr exact_cpu, StorePtr store, c10::intrusive_ptr<ZcommOptions> options, Host host)
    : Backend(exact_cpu->getRank(), exact_cpu->getSize()),
      exact_cpu_(std::move(exact_cpu)),
      store_(std::move(store)),
      options_(std::move(options)),
      host_(std::move(host)),
      telemetry_(options_->telemetry_every),
      host_runner_([this] { return connect_gloo(); }, [this](const std::exception& error) { return fail(error); },
                   [this] { return c10::intrusive_ptr<ProcessGroup>::unsafe_reclaim_from_nonowning(this); }),
      device_runner_(
          [this](at::Device device, const std::shared_ptr<Failure>& failure) { return connect_nccl(device, failure); },
          [this](const std::exception& error) { return fail(error); }, options_->high_priority_stream,
          options_->blocking_wait) {
  init();
}

void ProcessGroup::agree() {
  if (agreed_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(agree_mutex_);
  if (agreed_.load(std::memory_order_relaxed)) return;
  try {
    topology_.emplace(ask(host_.agree));
  } catch (const Error& error) {
    std::rethrow_exception(fail(error));
  }
  agreed_.store(true, std::memory_order_release);
}

Verdict ProcessGroup::judge(const Policy& policy, const Call& call) {
  agree();
  const Verdict verdict = decide(policy, call, getSize());
  enforce_strict(policy, call, verdict);
  return verdict;
}

bool ProcessGroup::is_strict() const { return effective_policy(options_->policy).strict; }

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

std::unique_ptr<Communicator> ProcessGroup::connect_gloo() {
  auto transport = std::make_unique<C10dTransport>(ask(host_.make_transport_group), store_);
  return std::make_unique<Communicator>(std::move(transport), *topology_, make_cpu_codec(), make_host_workspace(),
                                        options_->chunk_bytes);
}

std::unique_ptr<Communicator> ProcessGroup::connect_nccl(at::Device device, const std::shared_ptr<Failure>& failure) {
  auto workspace = make_torch_workspace(device.type());
  auto codec = make_cuda_codec(*workspace);
  load_nccl(ask(host_.meet_for_nccl));
  NcclOptions options;
  if (getRank() == 0) {
    options.unique_id = make_nccl_unique_id();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(options.unique_id.data());
    store_->set(kNcclIdKey, std::vector<std::uint8_t>(bytes, bytes + options.unique_id.size()));
  } else {
    const std::vector<std::uint8_t> bytes = store_->get(kNcclIdKey);
    std::memcpy(options.unique_id.data(), bytes.data(), std::min(bytes.size(), options.unique_id.size()));
  }
  options.rank = getRank();
  options.size = getSize();
  options.connect_timeout = options_->timeout;
  // Called by the watchdog, which ends before this group does.
  options.on_failure = [this, failure](const std::string& reason) {
    failure->set(fail(TransportError(reason)));
    store_->compareSet(kNcclFailureKey, "", "rank " + std::to_string(getRank()) + " gave up: " + reason);
  };
  options.peer_failure = [this]() -> std::string {
    if (!store_->check({kNcclFailureKey})) return {};
    const std::vector<std::uint8_t> text = store_->get(kNcclFailureKey);
    return {text.begin(), text.end()};
  };
  return std::make_unique<Communicator>(make_nccl_transport(options), *topology_, std::move(codec),
                                        std::move(workspace), options_->chunk_bytes);
}

::c10d::Backend& ProcessGroup::exact_cuda() {
  const std::lock_guard lock(exact_cuda_mutex_);
  if (!exact_cuda_) {
    exact_cuda_ = ask(host_.make_exact_cuda);
    exact_cuda_->setGroupUid(getGroupUid());
  }
  return *exact_cuda_;
}

std::string ProcessGroup::prefixed(const std::string& text) const {
  return "zcomm, rank " + std::to_string(getRank()) + " of group '" + getGroupUid() + "': " + text;
}

std::exception_ptr ProcessGroup::fail(const std::exception& error) {
  const bool timed_out = dynamic_cast<const TimeoutError*>(&error) != nullptr;
  error_ = timed_out ? ::c10d::ErrorType::TIMEOUT : ::c10d::ErrorType::COMM_ERROR;
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, prefixed(error.what())));
}

WorkPtr ProcessGroup::launch(Collective collective, ::c10d::OpType type, const char* title,
                             std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs, bool async, SitePtr site,
                             Run run) {
  const bool on_cpu = outputs[0].device().is_cpu();
  // As calls are launched, not as they run, so that a step's calls are its own. Odd factors: no two alike.
  const std::uint64_t seed =
      options_->seed + 0xd1342543de82ef95 * step_.load() + 0xaf251af3b0f025b5 * calls_in_step_.fetch_add(1);
  Job job{type,
          title,
          std::move(inputs),
          std::move(outputs),
          sequence_number_.load(),
          async,
          [this, collective, seed, site = std::move(site), run = std::move(run)](Communicator& communicator,
                                                                                 StreamView stream) {
            communicator.set_seed(seed);
            const CallStats cost = run(communicator, stream);
            stats_.compressed(collective).add(cost);
            if (site) site->add(cost);
          }};
  Runner& runner = on_cpu ? static_cast<Runner&>(host_runner_) : device_runner_;
  return track(runner.launch(std::move(job)));
}

template <class Format>
void ProcessGroup::sample(Collective collective, const SitePtr& site, at::Device device,
                          std::span<const ConstTensorView> slots, std::span<const Segment<Format>> segments,
                          Communicator& communicator, StreamView stream) {
  if (!telemetry_.is_on()) return;
  const auto formats_of = [](const Format& format) {
    if constexpr (std::is_same_v<Format, HopFormats>) {
      return format;
    } else {
      return HopFormats{format, format};
    }
  };
  const auto is_lossy = [&](const Segment<Format>& segment) {
    return segment.num_elements > 0 && !formats_of(segment.format).is_exact();
  };
  const auto count = static_cast<std::size_t>(std::count_if(segments.begin(), segments.end(), is_lossy));
  std::int64_t begin = 0;
  std::size_t index = 0;
  for (const Segment<Format>& segment : segments) {
    if (is_lossy(segment)) {
      std::vector<ConstTensorView> parts;
      for (const ConstTensorView& slot : slots) parts.push_back(slot.slice(begin, segment.num_elements));
      const std::string name = site ? site->name_of_part(index++, count) : "";
      telemetry_.before({collective, name, device}, parts, formats_of(segment.format), communicator, stream);
    }
    begin += segment.num_elements;
  }
}

WorkPtr ProcessGroup::launch_all_gather(::c10d::OpType type, const at::Tensor& input, std::vector<TensorView> slots,
                                        std::vector<at::Tensor> outputs, const Terms& terms, GatherCall call) {
  if (call.segments.empty()) call.segments.push_back({input.numel(), terms.policy.all_gather});
  std::vector<at::Tensor> held{input};
  GatherExtras extras;
  const auto use = [&](const at::Tensor& tensor) {
    held.push_back(tensor);
    return static_cast<std::byte*>(tensor.data_ptr());
  };
  if (call.secondary.defined()) extras.secondary = use(call.secondary);
  if (call.reference.defined()) extras.reference = use(call.reference);
  const SitePtr site = call.site;  // the lambda takes the call
  return launch(
      Collective::all_gather, type, "zcomm:all_gather", std::move(held), std::move(outputs), terms.async, site,
      [this, shard = ConstTensorView(view_of(input)), views = std::move(slots), call = std::move(call),
       timeout = terms.timeout, extras, device = input.device()](Communicator& communicator, StreamView stream) {
        const GatherSegments segments(call.segments);
        // Of differences it would measure the weights.
        if (extras.reference == nullptr) {
          sample(Collective::all_gather, call.site, device, {&shard, 1}, segments, communicator, stream);
        }
        return communicator.all_gather(shard, views, segments, timeout, stream, extras);
      });
}

WorkPtr ProcessGroup::launch_reduce_scatter(::c10d::OpType type, const at::Tensor& output,
                                            std::vector<TensorView> slots, std::vector<at::Tensor> inputs,
                                            const ::c10d::ReduceOp& op, const Terms& terms, ReduceCall call) {
  if (call.segments.empty()) call.segments.push_back({output.numel(), terms.policy.reduce_scatter});
  if (call.feedback) inputs.push_back(call.residual);
  const SitePtr site = call.site;
  return launch(Collective::reduce_scatter, type, "zcomm:reduce_scatter", std::move(inputs), {output}, terms.async,
                site,
                [this, result = view_of(output), views = std::vector<ConstTensorView>(slots.begin(), slots.end()),
                 call = std::move(call), factor = static_cast<float>(factor_of(op, getSize())), timeout = terms.timeout,
                 device = output.device()](Communicator& communicator, StreamView stream) {
                  const ReduceSegments segments(call.segments);
                  sample(Collective::reduce_scatter, call.site, device, views, segments, communicator, stream);
                  return communicator.reduce_scatter(views, result, segments, factor, timeout, stream,
                                                     call.feedback ? &*call.feedback : nullptr);
                });
}

WorkPtr ProcessGroup::launch_all_reduce(::c10d::OpType type, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                                        const Terms& terms, ReduceCall call) {
  std::vector<at::Tensor> inputs{tensor};
  if (call.feedback) inputs.push_back(call.residual);
  const SitePtr site = call.site;
  return launch(Collective::all_reduce, type, "zcomm:all_reduce", std::move(inputs), {tensor}, terms.async, site,
                [this, view = view_of(tensor), formats = terms.policy.all_reduce, call = std::move(call),
                 factor = static_cast<float>(factor_of(op, getSize())), timeout = terms.timeout,
                 device = tensor.device()](Communicator& communicator, StreamView stream) {
                  const ConstTensorView whole = view;
                  telemetry_.before({Collective::all_reduce, "", device}, {&whole, 1}, formats, communicator, stream);
                  return communicator.all_reduce(view, formats, factor, timeout, stream,
                                                 call.feedback ? &*call.feedback : nullptr);
                });
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  const Terms terms = terms_of(opts);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(output, input, getRank());
  if (!admit(terms.policy, call, [&] { check_shapes(output, input, getSize(), "output", "input"); })) {
    return hand_over(output, [&](::c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
  }
  return launch_all_gather(::c10d::OpType::_ALLGATHER_BASE, input, slots_of(output, getSize()), {output}, terms);
}

WorkPtr ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const ::c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    return hand_over(first_device(inputs), [&](::c10d::Backend& inner) {
      return inner.allgather(outputs, inputs, opts);
    });  // which refuses it
  }
  const Terms terms = terms_of(opts);
  const Call call = describe(Collective::all_gather, Form::list, inputs[0], outputs[0]);
  if (!admit(terms.policy, call,
             [&] { check_list(outputs[0], inputs[0], getSize(), "output_tensors", "input_tensor"); })) {
    return hand_over(inputs[0], [&](::c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
  }
  return launch_all_gather(::c10d::OpType::ALLGATHER, inputs[0], views_of(outputs[0]), outputs[0], terms);
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::ReduceScatterOptions& opts) {
  const Terms terms = terms_of(opts);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, opts.reduceOp);
  if (!admit(terms.policy, call, [&] { check_shapes(input, output, getSize(), "input", "output"); })) {
    if (!emulates(opts.reduceOp, output))
      return hand_over(output, [&](::c10d::Backend& inner) { return inner._reduce_scatter_base(output, input, opts); });
    at::Tensor product = scaled({input}, factor_of(opts.reduceOp, getSize()))[0];
    return hand_over(output,
                     [&](::c10d::Backend& inner) { return inner._reduce_scatter_base(output, product, as_sum(opts)); });
  }
  return launch_reduce_scatter(::c10d::OpType::_REDUCE_SCATTER_BASE, output, slots_of(input, getSize()), {input},
                               opts.reduceOp, terms);
}

WorkPtr ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                     const ::c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    return hand_over(first_device(outputs),
                     [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
  }
  const Terms terms = terms_of(opts);
  const Call call = describe(Collective::reduce_scatter, Form::list, outputs[0], inputs[0], opts.reduceOp);
  if (!admit(terms.policy, call, [&] { check_list(inputs[0], outputs[0], getSize(), "input_list", "output"); })) {
    if (!emulates(opts.reduceOp, outputs[0]))
      return hand_over(outputs[0], [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
    std::vector<std::vector<at::Tensor>> products{scaled(inputs[0], factor_of(opts.reduceOp, getSize()))};
    return hand_over(outputs[0],
                     [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, products, as_sum(opts)); });
  }
  return launch_reduce_scatter(::c10d::OpType::REDUCE_SCATTER, outputs[0], views_of(inputs[0]), inputs[0],
                               opts.reduceOp, terms);
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1)
    return hand_over(first_device(tensors), [&](::c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
  const Terms terms = terms_of(opts);
  const Call call = describe(Collective::all_reduce, Form::single, tensors[0], tensors, opts.reduceOp);
  if (!admit(terms.policy, call, [] {})) {
    if (!emulates(opts.reduceOp, tensors[0]))
      return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
    scale_in_place(tensors, factor_of(opts.reduceOp, getSize()));
    return hand_over(tensors[0], [&](::c10d::Backend& inner) { return inner.allreduce(tensors, as_sum(opts)); });
  }
  return launch_all_reduce(::c10d::OpType::ALLREDUCE, tensors[0], opts.reduceOp, terms);
}

}  // namespace zcomm::c10d_binding
