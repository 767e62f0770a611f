// Calls that hold several collectives. Each tensor is compressed or not by itself; exact ones go out in one exact
// coalesced call. All are checked before the first moves a byte.
#include "c10d/base/tensors.hpp"
#include "process_group.hpp"

namespace zcomm::c10d_binding {
namespace {

using Indices = std::vector<std::size_t>;

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zcomm: outputs: expected ", inputs.size(),
                    " tensors as in inputs, got ", outputs.size());
}

std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const Indices& indices) {
  std::vector<at::Tensor> picked;
  for (const std::size_t i : indices) picked.push_back(tensors[i]);
  return picked;
}

}  // namespace

template <class Check, class JobOf, class Forward>
WorkPtr ProcessGroup::coalesced(const Policy& policy, const std::vector<Call>& calls,
                                const std::vector<at::Tensor>& outputs, Check&& check, JobOf&& job_of,
                                Forward&& forward) {
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    verdicts.push_back(compressed_.decide(policy, calls[i]));
    if (verdicts[i] == Verdict::compressed) check(i);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) compressed_.count(calls[i], verdicts[i]);
  std::vector<WorkPtr> works;
  Indices exact;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (verdicts[i] == Verdict::compressed) {
      works.push_back(compressed_.launch(job_of(i)));
    } else {
      exact.push_back(i);
    }
  }
  if (!exact.empty()) works.push_back(forward(exact));
  std::erase(works, WorkPtr());  // of a synchronous call NCCL returns none
  if (works.empty()) return {};
  if (works.size() == 1) return works[0];
  return combine(std::move(works), outputs);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  check_pairs(outputs, inputs);
  const CallSettings settings = settings_of(opts);
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(describe(Collective::all_gather, Form::coalesced, inputs[i], {&outputs[i], 1}));
    calls.back().traced = inputs.size() == 1 && is_traced(settings.policy);
  }
  const auto check = [&](std::size_t i) { check_shapes(outputs[i], inputs[i], getSize(), "output", "input"); };
  const auto job_of = [&](std::size_t i) {
    return compressed_.gather(::c10d::OpType::COALESCED, {inputs[i]}, {outputs[i]}, settings);
  };
  return coalesced(settings.policy, calls, outputs, check, job_of, [&](const Indices& exact) {
    std::vector<at::Tensor> exact_outputs = pick(outputs, exact);
    std::vector<at::Tensor> exact_inputs = pick(inputs, exact);
    return inner_.forward("all_gather_into_tensor_coalesced", exact_inputs, exact_outputs, settings.timeout,
                          [&](::c10d::Backend& inner) {
                            return inner.allgather_into_tensor_coalesced(exact_outputs, exact_inputs, opts);
                          });
  });
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                                      const ::c10d::ReduceScatterOptions& opts) {
  check_pairs(outputs, inputs);
  const CallSettings settings = settings_of(opts);
  std::vector<Call> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(describe(Collective::reduce_scatter, Form::coalesced, outputs[i], {&inputs[i], 1}, opts.reduceOp));
    calls.back().traced = inputs.size() == 1 && is_traced(settings.policy);
  }
  const auto check = [&](std::size_t i) { check_shapes(inputs[i], outputs[i], getSize(), "input", "output"); };
  const auto job_of = [&](std::size_t i) {
    return compressed_.reduction(::c10d::OpType::COALESCED, {inputs[i]}, outputs[i], opts.reduceOp, settings);
  };
  return coalesced(settings.policy, calls, outputs, check, job_of, [&](const Indices& exact) {
    std::vector<at::Tensor> exact_outputs = pick(outputs, exact);
    std::vector<at::Tensor> exact_inputs = pick(inputs, exact);
    const bool scale = needs_premul_emulation(opts.reduceOp, exact_inputs[0]);
    if (scale) exact_inputs = scaled(exact_inputs, factor_of(opts.reduceOp, getSize()));
    return inner_.forward(
        "reduce_scatter_tensor_coalesced", exact_inputs, exact_outputs, settings.timeout, [&](::c10d::Backend& inner) {
          return inner.reduce_scatter_tensor_coalesced(exact_outputs, exact_inputs, scale ? as_sum(opts) : opts);
        });
  });
}

WorkPtr ProcessGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                          const ::c10d::AllreduceCoalescedOptions& opts) {
  const CallSettings settings = settings_of(opts);
  std::vector<Call> calls;
  for (const at::Tensor& tensor : tensors) {
    calls.push_back(describe(Collective::all_reduce, Form::coalesced, tensor, {&tensor, 1}, opts.reduceOp));
  }
  const auto job_of = [&](std::size_t i) {
    return compressed_.all_reduction(::c10d::OpType::ALLREDUCE_COALESCED, tensors[i], opts.reduceOp, settings);
  };
  return coalesced(
      settings.policy, calls, tensors, [](std::size_t) {}, job_of,
      [&](const Indices& exact) {
        std::vector<at::Tensor> exact_tensors = pick(tensors, exact);
        const bool scale = needs_premul_emulation(opts.reduceOp, exact_tensors[0]);
        if (scale) scale_in_place(exact_tensors, factor_of(opts.reduceOp, getSize()));
        return inner_.forward("allreduce_coalesced", exact_tensors, exact_tensors, settings.timeout,
                              [&](::c10d::Backend& inner) {
                                return inner.allreduce_coalesced(exact_tensors, scale ? as_sum(opts) : opts);
                              });
      });
}

}  // namespace zcomm::c10d_binding
