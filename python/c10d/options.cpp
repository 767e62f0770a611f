#include "options.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/utils/pybind.h>

namespace zcomm::c10d_binding {

Policy PolicyOverride::apply(Policy policy, const ::c10d::Backend* group) const {
  if (all_reduce_of && all_reduce_of->first == group) policy.all_reduce = all_reduce_of->second;
  std::size_t row = 0;
  for_each_field([&](const OptionField&, auto member) {
    if constexpr (is_overridable(decltype(member){})) {
      if (named[row]) policy.*member = values.policy.*member;
    }
    ++row;
  });
  if (drops_traced) policy.forms.traced.clear();
  if (exact_because) policy.exact_because = exact_because;
  return policy;
}

Policy effective_policy(const Policy& policy, const ::c10d::Backend* group) {
  if (!at::impl::ThreadLocalPythonObjects::contains(kOverrideKey)) return policy;
  const auto& stashed = at::impl::ThreadLocalPythonObjects::get(kOverrideKey);
  const pybind11::gil_scoped_acquire gil;
  const pybind11::handle object(stashed->ptr(&stashed->pyinterpreter()));
  return object.is_none() ? policy : object.cast<const PolicyOverride&>().apply(policy, group);
}

}  // namespace zcomm::c10d_binding
