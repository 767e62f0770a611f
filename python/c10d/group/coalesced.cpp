// Calls that hold several collectives. Each tensor is compressed or not by itself; exact ones go out in one exact
// coalesced call. All are checked before the first moves a byte.
#include "c10d/base/tensors.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zcomm: outputs: expected ", inputs.size(),
                    " tensors as in inputs, got ", outputs.size());
}

}  // namespace

template <class Check, class Forward>
WorkPtr ProcessGroup::coalesced(const char* name, std::vector<Request> requests, const std::vector<at::Tensor>& outputs,
                                Check&& check, Forward&& forward) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].verdict = compressed_.decide(requests[i]);
    if (requests[i].verdict == Verdict::compressed) check(i);
  }
  for (const Request& request : requests) compressed_.count(request.call, request.verdict);
  std::vector<WorkPtr> works;
  std::vector<at::Tensor> exact_inputs, exact_outputs;
  Verdict first_exact{};
  for (Request& request : requests) {
    if (request.verdict == Verdict::compressed) {
      works.push_back(compressed_.launch(std::move(request)));
    } else {
      if (exact_inputs.empty()) first_exact = request.verdict;
      exact_inputs.push_back(request.inputs[0]);
      exact_outputs.push_back(request.outputs[0]);
    }
  }
  if (!exact_inputs.empty()) {
    const auto timeout = requests[0].settings.timeout;
    const InnerCall call{recorded_call(name, exact_inputs, exact_outputs, timeout), exact_inputs[0].device(),
                         exact_inputs, exact_outputs, to_string(first_exact)};
    works.push_back(
        inner_.forward(call, [&](::c10d::Backend& inner) { return forward(inner, exact_outputs, exact_inputs); }));
  }
  std::erase(works, WorkPtr());  // of a synchronous call NCCL returns none
  if (works.empty()) return {};
  if (works.size() == 1) return works[0];
  return combine(std::move(works), outputs);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  check_pairs(outputs, inputs);
  put_in_order(inputs);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Call call = describe(Collective::all_gather, Form::coalesced, inputs[i], {&outputs[i], 1});
    call.in_place = is_own_slot(inputs[i], outputs[i], getRank());
    call.may_be_traced = inputs.size() == 1;
    requests.push_back(request_of(call, ::c10d::OpType::COALESCED, {inputs[i]}, {outputs[i]}, opts));
  }
  return coalesced(
      "all_gather_into_tensor_coalesced", std::move(requests), outputs,
      [&](std::size_t i) { check_shapes(outputs[i], inputs[i], getSize(), "output", "input"); },
      [&](::c10d::Backend& inner, std::vector<at::Tensor>& exact_outputs, std::vector<at::Tensor>& exact_inputs) {
        return inner.allgather_into_tensor_coalesced(exact_outputs, exact_inputs, opts);
      });
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::ReduceScatterOptions& opts) {
  check_pairs(outputs, inputs);
  put_in_order(inputs);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Call call = describe(Collective::reduce_scatter, Form::coalesced, outputs[i], {&inputs[i], 1}, opts.reduceOp);
    call.may_be_traced = inputs.size() == 1;
    requests.push_back(request_of(call, ::c10d::OpType::COALESCED, {inputs[i]}, {outputs[i]}, opts));
  }
  return coalesced(
      "reduce_scatter_tensor_coalesced", std::move(requests), outputs,
      [&](std::size_t i) { check_shapes(inputs[i], outputs[i], getSize(), "input", "output"); },
      [&](::c10d::Backend& inner, std::vector<at::Tensor>& exact_outputs, std::vector<at::Tensor>& exact_inputs) {
        const bool scale = needs_premul_emulation(opts.reduceOp, exact_inputs[0]);
        if (scale) exact_inputs = scaled(exact_inputs, factor_of(opts.reduceOp, getSize()));
        return inner.reduce_scatter_tensor_coalesced(exact_outputs, exact_inputs, scale ? as_sum(opts) : opts);
      });
}

WorkPtr ProcessGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                          const ::c10d::AllreduceCoalescedOptions& opts) {
  check_any(tensors, "tensors");
  std::vector<Request> requests;
  for (const at::Tensor& tensor : tensors) {
    const Call call = describe(Collective::all_reduce, Form::coalesced, tensor, {&tensor, 1}, opts.reduceOp);
    requests.push_back(request_of(call, ::c10d::OpType::ALLREDUCE_COALESCED, {tensor}, {tensor}, opts));
  }
  return coalesced(
      "allreduce_coalesced", std::move(requests), tensors, [](std::size_t) {},
      [&](::c10d::Backend& inner, std::vector<at::Tensor>& exact, std::vector<at::Tensor>&) {
        const bool scale = needs_premul_emulation(opts.reduceOp, exact[0]);
        if (scale) scale_in_place(exact, factor_of(opts.reduceOp, getSize()));
        return inner.allreduce_coalesced(exact, scale ? as_sum(opts) : opts);
      });
}

}  // namespace zcomm::c10d_binding
