// The calls that hold several collectives. Each tensor is compressed or not for itself; what stays exact goes out in
// one exact coalesced call. All are checked before the first moves a byte.
#include "process_group.hpp"
#include "tensors.hpp"
#include "work.hpp"

namespace zcomm::c10d_binding {
namespace {

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zcomm: outputs has ", outputs.size(), " tensors, need the ",
                    inputs.size(), " of inputs");
}

std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& indices) {
  std::vector<at::Tensor> picked;
  for (const std::size_t i : indices) picked.push_back(tensors[i]);
  return picked;
}

}  // namespace

template <class Check>
ProcessGroup::Parts ProcessGroup::part(const Policy& policy, const std::vector<Call>& calls, Check&& check) {
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    verdicts.push_back(judge(policy, calls[i]));
    if (verdicts[i] == Verdict::compressed) check(i);
  }
  Parts parts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    count(calls[i], verdicts[i]);
    (verdicts[i] == Verdict::compressed ? parts.compressed : parts.exact).push_back(i);
  }
  return parts;
}

WorkPtr ProcessGroup::combine(std::vector<WorkPtr> works) {
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<CombinedWork>(getRank(), std::move(works));
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  check_pairs(outputs, inputs);
  const Terms terms = terms_of(opts);
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(describe(Collective::all_gather, Form::coalesced, inputs[i], {&outputs[i], 1}));
  }
  const Parts parts = part(terms.policy, calls,
                           [&](std::size_t i) { check_shapes(outputs[i], inputs[i], getSize(), "output", "input"); });
  std::vector<WorkPtr> works;
  for (const std::size_t i : parts.compressed) {
    works.push_back(
        launch_all_gather(::c10d::OpType::COALESCED, inputs[i], slots_of(outputs[i], getSize()), {outputs[i]}, terms));
  }
  if (!parts.exact.empty()) {
    std::vector<at::Tensor> exact_outputs = pick(outputs, parts.exact);
    std::vector<at::Tensor> exact_inputs = pick(inputs, parts.exact);
    works.push_back(hand_over(exact_inputs[0], [&](::c10d::Backend& inner) {
      return inner.allgather_into_tensor_coalesced(exact_outputs, exact_inputs, opts);
    }));
  }
  return combine(std::move(works));
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::ReduceScatterOptions& opts) {
  check_pairs(outputs, inputs);
  const Terms terms = terms_of(opts);
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(describe(Collective::reduce_scatter, Form::coalesced, outputs[i], {&inputs[i], 1}, opts.reduceOp));
  }
  const Parts parts = part(terms.policy, calls,
                           [&](std::size_t i) { check_shapes(inputs[i], outputs[i], getSize(), "input", "output"); });
  std::vector<WorkPtr> works;
  for (const std::size_t i : parts.compressed) {
    works.push_back(launch_reduce_scatter(::c10d::OpType::COALESCED, outputs[i], slots_of(inputs[i], getSize()),
                                          {inputs[i]}, opts.reduceOp, terms));
  }
  if (!parts.exact.empty()) {
    std::vector<at::Tensor> exact_outputs = pick(outputs, parts.exact);
    std::vector<at::Tensor> exact_inputs = pick(inputs, parts.exact);
    const bool scale = emulates(opts.reduceOp, exact_inputs[0]);
    if (scale) exact_inputs = scaled(exact_inputs, factor_of(opts.reduceOp, getSize()));
    works.push_back(hand_over(exact_inputs[0], [&](::c10d::Backend& inner) {
      return inner.reduce_scatter_tensor_coalesced(exact_outputs, exact_inputs, scale ? as_sum(opts) : opts);
    }));
  }
  return combine(std::move(works));
}

WorkPtr ProcessGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                          const ::c10d::AllreduceCoalescedOptions& opts) {
  const Terms terms = terms_of(opts);
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    calls.push_back(describe(Collective::all_reduce, Form::coalesced, tensor, {&tensor, 1}, opts.reduceOp));
  }
  const Parts parts = part(terms.policy, calls, [](std::size_t) {});
  std::vector<WorkPtr> works;
  for (const std::size_t i : parts.compressed) {
    works.push_back(launch_all_reduce(::c10d::OpType::ALLREDUCE_COALESCED, tensors[i], opts.reduceOp, terms));
  }
  if (!parts.exact.empty()) {
    std::vector<at::Tensor> exact_tensors = pick(tensors, parts.exact);
    const bool scale = emulates(opts.reduceOp, exact_tensors[0]);
    if (scale) scale_in_place(exact_tensors, factor_of(opts.reduceOp, getSize()));
    works.push_back(hand_over(exact_tensors[0], [&](::c10d::Backend& inner) {
      return inner.allreduce_coalesced(exact_tensors, scale ? as_sum(opts) : opts);
    }));
  }
  return combine(std::move(works));
}

}  // namespace zcomm::c10d_binding
