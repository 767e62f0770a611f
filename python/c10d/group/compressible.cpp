// Calls that may be compressed.
#include "c10d/base/tensors.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

at::DeviceType first_device(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::kCPU : tensors[0].device().type();
}

}  // namespace

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  const CallSettings settings = settings_of(opts);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = static_cast<const char*>(input.data_ptr()) ==
                  static_cast<const char*>(output.data_ptr()) + static_cast<std::size_t>(getRank()) * input.nbytes();
  call.traced = is_traced(settings.policy);
  const auto check = [&] { check_shapes(output, input, getSize(), "output", "input"); };
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("_all_gather_base", input, output, settings.timeout,
                          [&](::c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
  }
  return compressed_.launch(compressed_.gather(::c10d::OpType::_ALLGATHER_BASE, {input}, {output}, settings));
}

WorkPtr ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const ::c10d::AllgatherOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    return inner_.forward(first_device(inputs), [&](::c10d::Backend& inner) {
      return inner.allgather(outputs, inputs, opts);
    });  // it refuses the call
  }
  const CallSettings settings = settings_of(opts);
  const Call call = describe(Collective::all_gather, Form::list, inputs[0], outputs[0]);
  const auto check = [&] { check_list(outputs[0], inputs[0], getSize(), "output_tensors", "input_tensor"); };
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("all_gather", inputs, outputs[0], settings.timeout,
                          [&](::c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
  }
  return compressed_.launch(compressed_.gather(::c10d::OpType::ALLGATHER, {inputs[0]}, outputs[0], settings));
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::ReduceScatterOptions& opts) {
  const CallSettings settings = settings_of(opts);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, opts.reduceOp);
  if (!compressed_.compresses(settings.policy, call,
                              [&] { check_shapes(input, output, getSize(), "input", "output"); })) {
    const bool scale = needs_premul_emulation(opts.reduceOp, output);
    at::Tensor terms = scale ? scaled({input}, factor_of(opts.reduceOp, getSize()))[0] : input;
    return inner_.forward("_reduce_scatter_base", input, output, settings.timeout, [&](::c10d::Backend& inner) {
      return inner._reduce_scatter_base(output, terms, scale ? as_sum(opts) : opts);
    });
  }
  return compressed_.launch(
      compressed_.reduction(::c10d::OpType::_REDUCE_SCATTER_BASE, {input}, output, opts.reduceOp, settings));
}

WorkPtr ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                     const ::c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    return inner_.forward(first_device(outputs),
                          [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
  }
  if (getSize() > 1) {
    check_in_order(outputs, "output");
    check_in_order(inputs[0], "input_list");
  }
  const CallSettings settings = settings_of(opts);
  const Call call = describe(Collective::reduce_scatter, Form::list, outputs[0], inputs[0], opts.reduceOp);
  if (!compressed_.compresses(settings.policy, call,
                              [&] { check_list(inputs[0], outputs[0], getSize(), "input_list", "output"); })) {
    const bool scale = needs_premul_emulation(opts.reduceOp, outputs[0]);
    std::vector<std::vector<at::Tensor>> products;
    if (scale) products.push_back(scaled(inputs[0], factor_of(opts.reduceOp, getSize())));
    return inner_.forward("reduce_scatter", inputs[0], outputs, settings.timeout, [&](::c10d::Backend& inner) {
      return inner.reduce_scatter(outputs, scale ? products : inputs, scale ? as_sum(opts) : opts);
    });
  }
  return compressed_.launch(
      compressed_.reduction(::c10d::OpType::REDUCE_SCATTER, inputs[0], outputs[0], opts.reduceOp, settings));
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1)
    return inner_.forward(first_device(tensors),
                          [&](::c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
  if (getSize() > 1) check_no_gaps(tensors[0]);
  const CallSettings settings = settings_of(opts);
  const Call call = describe(Collective::all_reduce, Form::single, tensors[0], tensors, opts.reduceOp);
  if (!compressed_.compresses(settings.policy, call, [] {})) {
    const bool scale = needs_premul_emulation(opts.reduceOp, tensors[0]);
    if (scale) scale_in_place(tensors, factor_of(opts.reduceOp, getSize()));
    return inner_.forward("all_reduce", tensors, tensors, settings.timeout, [&](::c10d::Backend& inner) {
      return inner.allreduce(tensors, scale ? as_sum(opts) : opts);
    });
  }
  return compressed_.launch(compressed_.all_reduction(::c10d::OpType::ALLREDUCE, tensors[0], opts.reduceOp, settings));
}

}  // namespace zcomm::c10d_binding
