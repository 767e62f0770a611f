#include "options.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/utils/pybind.h>

#include <type_traits>

namespace zcomm::c10d_binding {
namespace {

std::string text_of(const BlockFormat& format) { return "'" + format.to_string() + "'"; }
std::string text_of(const HopFormats& formats) { return "'" + formats.to_string() + "'"; }
std::string text_of(Choice choice) { return "'" + std::string(to_string(choice)) + "'"; }
std::string text_of(const Forms& forms) {
  std::string text;
  for (const std::string& name : forms.names()) text += (text.empty() ? "" : ",") + name;
  return "'" + text + "'";
}
std::string text_of(const std::string& text) { return "'" + text + "'"; }
std::string text_of(bool on) { return on ? "True" : "False"; }
std::string text_of(const std::optional<int>& number) { return number ? std::to_string(*number) : "None"; }
template <class Integer>
  requires(std::is_integral_v<Integer> && !std::is_same_v<Integer, bool>)
std::string text_of(Integer number) {
  return std::to_string(number);
}

}  // namespace

std::string to_string(const OptionValues& values) {
  std::string text;
  for_each_field([&](const OptionField& field, auto member) {
    text += (text.empty() ? "" : ", ") + std::string(field.name) + "=" + text_of(member_of(values, member));
  });
  return text;
}

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
