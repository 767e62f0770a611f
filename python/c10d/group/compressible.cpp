// Calls that may be compressed.
#include "c10d/base/tensors.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

at::DeviceType first_device(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::kCPU : tensors[0].device().type();
}

}  // namespace

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& given, const ::c10d::AllgatherOptions& opts) {
  at::Tensor input = in_order(given);
  Call call = describe(Collective::all_gather, Form::single, input, {&output, 1});
  call.in_place = is_own_slot(input, output, getRank());
  call.may_be_traced = true;
  return enter(
      request_of(call, ::c10d::OpType::_ALLGATHER_BASE, {input}, {output}, opts),
      [&] { check_shapes(output, input, getSize(), "output", "input"); },
      [&](::c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
}

WorkPtr ProcessGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                const ::c10d::AllgatherOptions& opts) {
  const auto exact = [&](::c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); };
  if (outputs.size() != 1 || inputs.size() != 1) return inner_.forward(first_device(inputs), exact);  // it refuses them
  put_in_order(inputs);
  check_count(outputs[0], getSize(), "output_tensors");
  const at::Tensor& own = outputs[0][static_cast<std::size_t>(getRank())];
  check_part(own, inputs[0], "output_tensors", "input_tensor");
  Call call = describe(Collective::all_gather, Form::list, inputs[0], outputs[0]);
  call.in_place = is_own_slot(inputs[0], own, 0);
  return enter(
      request_of(call, ::c10d::OpType::ALLGATHER, inputs, outputs[0], opts),
      [&] { check_list(outputs[0], inputs[0], getSize(), "output_tensors", "input_tensor"); }, exact);
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& given,
                                           const ::c10d::ReduceScatterOptions& opts) {
  at::Tensor input = in_order(given);
  const Call call = describe(Collective::reduce_scatter, Form::single, output, {&input, 1}, opts.reduceOp);
  return enter(
      request_of(call, ::c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, opts),
      [&] { check_shapes(input, output, getSize(), "input", "output"); },
      [&](::c10d::Backend& inner) {
        const bool scale = needs_premul_emulation(opts.reduceOp, output);
        at::Tensor terms = scale ? scaled({input}, factor_of(opts.reduceOp, getSize()))[0] : input;
        return inner._reduce_scatter_base(output, terms, scale ? as_sum(opts) : opts);
      });
}

WorkPtr ProcessGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                     const ::c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    return inner_.forward(first_device(outputs),
                          [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
  }
  check_count(inputs[0], getSize(), "input_list");
  check_part(inputs[0][static_cast<std::size_t>(getRank())], outputs[0], "input_list", "output");
  if (getSize() > 1) check_in_order(outputs, "output");
  put_in_order(inputs[0]);
  const Call call = describe(Collective::reduce_scatter, Form::list, outputs[0], inputs[0], opts.reduceOp);
  return enter(
      request_of(call, ::c10d::OpType::REDUCE_SCATTER, inputs[0], outputs, opts),
      [&] { check_list(inputs[0], outputs[0], getSize(), "input_list", "output"); },
      [&](::c10d::Backend& inner) {
        const bool scale = needs_premul_emulation(opts.reduceOp, outputs[0]);
        std::vector<std::vector<at::Tensor>> products;
        if (scale) products.push_back(scaled(inputs[0], factor_of(opts.reduceOp, getSize())));
        return inner.reduce_scatter(outputs, scale ? products : inputs, scale ? as_sum(opts) : opts);
      });
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() != 1)
    return inner_.forward(first_device(tensors),
                          [&](::c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
  if (getSize() > 1) check_no_gaps(tensors[0]);
  const Call call = describe(Collective::all_reduce, Form::single, tensors[0], tensors, opts.reduceOp);
  return enter(
      request_of(call, ::c10d::OpType::ALLREDUCE, tensors, tensors, opts), [] {},
      [&](::c10d::Backend& inner) {
        const bool scale = needs_premul_emulation(opts.reduceOp, tensors[0]);
        if (scale) scale_in_place(tensors, factor_of(opts.reduceOp, getSize()));
        return inner.allreduce(tensors, scale ? as_sum(opts) : opts);
      });
}

}  // namespace zcomm::c10d_binding
