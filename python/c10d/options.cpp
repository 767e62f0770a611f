#include "options.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/utils/pybind.h>

namespace zcomm::c10d_binding {

std::string ZcommOptions::to_string() const {
  const auto flag = [](bool on) { return on ? "True" : "False"; };
  return "all_gather='" + policy.all_gather.to_string() + "', reduce_scatter='" + policy.reduce_scatter.to_string() +
         "', all_reduce='" + policy.all_reduce.to_string() + "', min_bytes=" + std::to_string(policy.min_bytes) +
         ", out_of_place=" + flag(policy.out_of_place) + ", lists=" + flag(policy.lists) +
         ", coalesced=" + flag(policy.coalesced) + ", strict=" + flag(policy.strict) +
         ", node_size=" + (node_size == 0 ? "None" : std::to_string(node_size)) +
         ", chunk_bytes=" + std::to_string(chunk_bytes) + ", seed=" + std::to_string(seed);
}

Policy PolicyOverride::apply(Policy policy) const {
  if (all_gather) policy.all_gather = *all_gather;
  if (reduce_scatter) policy.reduce_scatter = *reduce_scatter;
  if (all_reduce) policy.all_reduce = *all_reduce;
  if (min_bytes) policy.min_bytes = *min_bytes;
  if (out_of_place) policy.out_of_place = *out_of_place;
  if (lists) policy.lists = *lists;
  if (coalesced) policy.coalesced = *coalesced;
  if (strict) policy.strict = *strict;
  return policy;
}

Policy effective_policy(const Policy& policy) {
  if (!at::impl::ThreadLocalPythonObjects::contains(kOverrideKey)) return policy;
  const auto& stashed = at::impl::ThreadLocalPythonObjects::get(kOverrideKey);
  const pybind11::gil_scoped_acquire gil;
  const pybind11::handle object(stashed->ptr(&stashed->pyinterpreter()));
  return object.is_none() ? policy : object.cast<const PolicyOverride&>().apply(policy);
}

}  // namespace zcomm::c10d_binding
