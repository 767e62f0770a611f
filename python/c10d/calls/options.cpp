// Options and overrides as Python sets them: fields are checked then.
#include "options.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <pybind11/stl.h>

#include <limits>
#include <sstream>
#include <utility>

#include "c10d/base/pointers.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

namespace py = pybind11;

namespace {

// Name of the override in force in torch's thread-local storage, which holds it as a Python object. torch carries that
// storage over to autograd threads.
constexpr const char* kOverrideKey = "zcomm.override";

std::string refusal(const char* name, const std::string& expected, const py::handle& value) {
  return std::string(name) + ": expected " + expected + ", got " + py::repr(value).cast<std::string>();
}

[[noreturn]] void refuse(const char* name, const py::handle& value, const std::string& expected) {
  throw py::type_error(refusal(name, expected, value));
}

// `parse` throws ArgumentError.
template <class Value, class Parse>
void set_parsed(const char* name, Value& target, Parse&& parse) {
  try {
    target = parse();
  } catch (const ArgumentError& error) {
    throw py::value_error(std::string(name) + ": " + error.what());
  }
}

template <class Format>
void set_format(const char* name, const py::handle& value, Format& target, const std::string& examples) {
  if (!py::isinstance<py::str>(value)) refuse(name, value, "a format such as " + examples);
  set_parsed(name, target, [&] { return Format::parse(value.cast<std::string>()); });
}

void set(const char* name, const py::handle& value, BlockFormat& target) {
  if (py::isinstance<py::str>(value) && value.cast<std::string>().find('/') != std::string::npos) {
    throw py::value_error(refusal(name, "one format", value) + ": broadcast and all_gather take one");
  }
  set_format(name, value, target, "'int8:256' or 'exact'");
}
void set(const char* name, const py::handle& value, HopFormats& target) {
  set_format(name, value, target, "'int8:256', 'int8:128/int4:128' or 'exact'");
}

void set(const char* name, const py::handle& value, Choice& target) {
  if (!py::isinstance<py::str>(value)) refuse(name, value, "'always' or 'auto'");
  set_parsed(name, target, [&] { return parse_choice(value.cast<std::string>()); });
}

// A sequence of names, or one text with commas.
void set(const char* name, const py::handle& value, Forms& target) {
  std::vector<std::string> names;
  const auto add = [&](std::string name) {
    name.erase(0, name.find_first_not_of(' '));
    name.erase(name.find_last_not_of(' ') + 1);
    names.push_back(std::move(name));
  };
  if (py::isinstance<py::str>(value)) {
    std::istringstream text(value.cast<std::string>());
    for (std::string name; std::getline(text, name, ',');) add(std::move(name));
  } else {
    if (!py::isinstance<py::sequence>(value) && !py::isinstance<py::anyset>(value)) {
      refuse(name, value, "names of forms");
    }
    for (const py::handle item : value) {
      if (!py::isinstance<py::str>(item)) refuse(name, value, "names of forms");
      add(item.cast<std::string>());
    }
  }
  set_parsed(name, target, [&] { return Forms::parse(names); });
}

// Rejects quotes and backslashes, which would need escapes wherever options are shown.
void set(const char* name, const py::handle& value, std::string& target) {
  if (!py::isinstance<py::str>(value)) refuse(name, value, "the name of a file");
  target = value.cast<std::string>();
  if (target.find_first_of("'\\\n") != std::string::npos) {
    throw py::value_error(refusal(name, "the name of a file without quotes, backslashes and line ends", value));
  }
}

void set(const char* name, const py::handle& value, bool& target) {
  if (!py::isinstance<py::bool_>(value)) refuse(name, value, "True or False");
  target = value.cast<bool>();
}

template <class Integer>
void set(const char* name, const py::handle& value, Integer& target, long long least = 0) {
  if (!py::isinstance<py::int_>(value) || py::isinstance<py::bool_>(value)) refuse(name, value, "an integer");
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0 || number < least || !std::in_range<Integer>(number)) {
    const bool too_large = overflow > 0 || number > least;
    throw py::value_error(refusal(name,
                                  too_large ? "at most " + std::to_string(std::numeric_limits<Integer>::max())
                                            : "at least " + std::to_string(least),
                                  value));
  }
  target = static_cast<Integer>(number);
}

void set(const char* name, const py::handle& value, std::optional<int>& target) {
  target.reset();
  if (!value.is_none()) set(name, value, target.emplace(), 1);
}

py::object to_python(const BlockFormat& format) { return py::str(format.to_string()); }
py::object to_python(const HopFormats& formats) { return py::str(formats.to_string()); }
py::object to_python(Choice choice) { return py::str(std::string(to_string(choice))); }
py::object to_python(const Forms& forms) { return py::tuple(py::cast(forms.names())); }
template <class Value>
py::object to_python(const Value& value) {
  return py::cast(value);
}

template <class Options, class T>
auto& member_of(Options& options, T ZcommOptions::* member) {
  return options.*member;
}
template <class Options, class T>
auto& member_of(Options& options, T Policy::* member) {
  return options.policy.*member;
}

// Returns all fields as Python would write them.
std::string text_of(const ZcommOptions& options) {
  std::string text;
  for_each_field([&](const char* name, auto member) {
    const std::string value = py::repr(to_python(member_of(options, member)));
    text += (text.empty() ? "" : ", ") + std::string(name) + "=" + value;
  });
  return text;
}

[[noreturn]] void refuse_name(const std::string& name) {
  throw py::type_error(name + ": expected an option, got none of that name");
}

c10::intrusive_ptr<ZcommOptions> make_options(const py::kwargs& fields) {
  auto options = c10::make_intrusive<ZcommOptions>();
  for (const auto& [key, value] : fields) {
    const auto given = key.cast<std::string>();
    bool is_known = false;
    for_each_field([&, &value = value](const char* name, auto member) {
      if (given != name) return;
      set(name, value, member_of(*options, member));
      is_known = true;
    });
    if (!is_known) refuse_name(given);
  }
  return options;
}

// Returns the change of a field of Policy.
PolicyOverride::Change change_of(const std::string& given, const py::handle& value) {
  PolicyOverride::Change change;
  const auto find = [&]<class T>(const char* name, T Policy::* member) {
    if (given != name) return;
    T field{};
    set(name, value, field);
    change = [=](Policy& policy, const ::c10d::Backend*) { policy.*member = field; };
  };
  for_each_field([&](const char* name, auto member) {
    if constexpr (requires { find(name, member); }) find(name, member);
  });
  if (!change) refuse_name(given);
  return change;
}

std::unique_ptr<PolicyOverride> make_override(const py::kwargs& fields) {
  auto result = std::make_unique<PolicyOverride>();
  std::vector<PolicyOverride::Change>& changes = result->changes;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "_drops_traced") {
      changes.emplace_back([](Policy& policy, const ::c10d::Backend*) { policy.forms.traced.clear(); });
    } else if (name == "_exact_because") {
      const auto verdict = value.cast<Verdict>();
      changes.emplace_back([=](Policy& policy, const ::c10d::Backend*) { policy.exact_because = verdict; });
    } else if (name == "_all_reduce_of") {
      const auto [of_group, text] = value.cast<std::pair<BackendPtr, std::string>>();
      const auto change = [only = of_group.get(), formats = HopFormats::parse(text)](Policy& policy,
                                                                                     const ::c10d::Backend* group) {
        if (group == only) policy.all_reduce = formats;
      };
      changes.insert(changes.begin(), change);  // any field that names formats wins
    } else {
      changes.push_back(change_of(name, value));
    }
  }
  return result;
}

}  // namespace

Policy effective_policy(const Policy& policy, const ::c10d::Backend* group) {
  if (!at::impl::ThreadLocalPythonObjects::contains(kOverrideKey)) return policy;
  const auto& stashed = at::impl::ThreadLocalPythonObjects::get(kOverrideKey);
  const py::gil_scoped_acquire gil;
  const py::handle object(stashed->ptr(&stashed->pyinterpreter()));
  return object.is_none() ? policy : object.cast<const PolicyOverride&>().apply(policy, group);
}

void bind_options(py::module_& module) {
  py::class_<ZcommOptions, c10::intrusive_ptr<ZcommOptions>, ::c10d::Backend::Options> options(module, "Options");
  py::list names;
  for_each_field([&](const char* name, auto member) {
    options.def_property_readonly(name, [member](const ZcommOptions& o) { return to_python(member_of(o, member)); });
    names.append(name);
  });
  module.attr("OPTION_NAMES") = py::tuple(names);
  options.def(py::init(&make_options))
      .def(
          "__eq__", [](const ZcommOptions& a, const ZcommOptions& b) { return text_of(a) == text_of(b); },
          py::is_operator())
      .def("__hash__", [](const ZcommOptions& o) { return py::hash(py::str(text_of(o))); })
      .def("__repr__", [](const ZcommOptions& o) { return "zcomm.Options(" + text_of(o) + ")"; });

  py::enum_<Verdict> verdicts(module, "Verdict");
  for (int i = 0; i < kNumVerdicts; ++i) {
    const auto verdict = static_cast<Verdict>(i);
    verdicts.value(std::string(to_string(verdict)).c_str(), verdict);
  }
  py::class_<PolicyOverride>(module, "PolicyOverride").def(py::init(&make_override));
  module.attr("OVERRIDE_KEY") = kOverrideKey;
}

}  // namespace zcomm::c10d_binding
