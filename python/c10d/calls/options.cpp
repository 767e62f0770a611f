// Options and overrides as Python sets them: fields are checked then.
#include "options.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <map>
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
    throw py::value_error(refusal(name, "one format", value));
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

std::string stripped(const std::string& text) {
  const std::size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(stripped(part));
  return parts;
}

// Returns the names in a sequence, or in a text with commas.
std::vector<std::string> names_of(const char* name, const py::handle& value) {
  if (py::isinstance<py::str>(value)) return split(value.cast<std::string>(), ',');
  if (!py::isinstance<py::sequence>(value) && !py::isinstance<py::anyset>(value)) refuse(name, value, "names of forms");
  std::vector<std::string> names;
  for (const py::handle item : value) {
    if (!py::isinstance<py::str>(item)) refuse(name, value, "names of forms");
    names.push_back(stripped(item.cast<std::string>()));
  }
  return names;
}

void set(const char* name, const py::handle& value, Forms& target) {
  set_parsed(name, target, [&] { return Forms::parse(names_of(name, value)); });
}

// A mapping of patterns, or one text: "PATTERN=form,form; PATTERN=exact".
void set(const char* name, const py::handle& value, std::vector<GroupRule>& target) {
  std::map<std::string, std::vector<std::string>> by_pattern;
  const auto add = [&](const std::string& pattern, std::vector<std::string> forms) {
    if (!by_pattern.emplace(pattern, std::move(forms)).second)
      throw py::value_error(refusal(name, "each pattern once", value));
  };
  if (py::isinstance<py::str>(value)) {
    for (const std::string& text : split(value.cast<std::string>(), ';')) {
      const std::size_t end = text.find('=');
      if (end == std::string::npos) throw py::value_error(refusal(name, "'PATTERN=form,form; PATTERN=exact'", value));
      add(stripped(text.substr(0, end)), split(text.substr(end + 1), ','));
    }
  } else {
    if (!py::isinstance<py::dict>(value)) refuse(name, value, "a dict such as {'DATA_PARALLEL*': 'single,coalesced'}");
    for (const auto& [pattern, forms] : value.cast<py::dict>()) {
      if (!py::isinstance<py::str>(pattern)) refuse(name, value, "patterns of names");
      add(stripped(pattern.cast<std::string>()), names_of(name, forms));
    }
  }
  set_parsed(name, target, [&] {
    std::vector<GroupRule> rules;
    for (const auto& [pattern, names] : by_pattern) rules.push_back(GroupRule::parse(pattern, names));
    return rules;
  });
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

void set(const char* name, const py::handle& value, Verify& target) {
  const std::string expected = "True, False or 'sample'";
  if (py::isinstance<py::bool_>(value)) {
    target = value.cast<bool>() ? Verify::all : Verify::none;
  } else if (!py::isinstance<py::str>(value)) {
    refuse(name, value, expected);
  } else if (value.cast<std::string>() != "sample") {
    throw py::value_error(refusal(name, expected, value));
  } else {
    target = Verify::sample;
  }
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
py::object to_python(Verify verify) {
  return verify == Verify::sample ? py::object(py::str("sample")) : py::bool_(verify == Verify::all);
}
py::object to_python(const Forms& forms) { return py::tuple(py::cast(forms.names())); }
py::object to_python(const std::vector<GroupRule>& rules) {
  py::dict all;
  for (const GroupRule& rule : rules) {
    std::string text = rule.exact ? "exact" : "";
    for (const std::string& form : rule.forms.names()) text += (text.empty() ? "" : ",") + form;
    all[py::str(rule.pattern)] = text;
  }
  return all;
}
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

// Returns advice if an option has nearly this name, else an empty string.
std::string hint_of(const std::string& name) {
  py::list known;
  for_each_field([&](const char* each, auto) { known.append(each); });
  const py::list close = py::module_::import("difflib").attr("get_close_matches")(name, known, 1, 0.75);
  if (close.empty() || close[0].cast<std::string>() == name) return "";
  return ": did you mean " + close[0].cast<std::string>() + "?";
}

[[noreturn]] void refuse_name(const std::string& name, const char* expected) {
  const bool is_exchange_call = name == "send_recv" || std::ranges::any_of(kCollectives, [&](Collective collective) {
                                  return is_exchange(collective) && to_string(collective) == name;
                                });
  throw py::type_error(name + ": expected " + expected + ", got none of that name" +
                       (is_exchange_call ? ": the option exchanges has the formats of all exchanges" : hint_of(name)));
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
    if (!is_known) refuse_name(given, "an option");
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
    change = [=](Policy& policy, const ::c10d::Backend&) { policy.*member = field; };
  };
  for_each_field([&](const char* name, auto member) {
    if constexpr (requires { find(name, member); }) find(name, member);
  });
  if (!change) refuse_name(given, "an option that an override may change");
  return change;
}

std::unique_ptr<PolicyOverride> make_override(const py::kwargs& fields) {
  auto result = std::make_unique<PolicyOverride>();
  std::vector<PolicyOverride::Change>& changes = result->changes;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "_drops_traced") {
      changes.emplace_back([](Policy& policy, const ::c10d::Backend&) { policy.drops_traced = true; });
    } else if (name == "_known") {
      changes.push_back([copies = value.cast<bool>()](Policy& policy, const ::c10d::Backend&) {
        policy.known = true;
        policy.copies = copies;
      });
    } else if (name == "_gradients") {  // formats of reductions, and of all-reduces and all-to-alls that have none
      const auto text = value.cast<std::string>();
      const auto change = [formats = text.empty() ? std::optional<HopFormats>() : HopFormats::parse(text)](
                              Policy& policy, const ::c10d::Backend&) {
        if (formats) policy.reduce_scatter = *formats;
      };
      changes.insert(changes.begin(), change);  // any field that names formats wins
    } else if (name == "_weights") {
      const auto change = [format = BlockFormat::parse(value.cast<std::string>())](
                              Policy& policy, const ::c10d::Backend&) { policy.all_gather = format; };
      changes.insert(changes.begin(), change);
    } else if (name == "_exact_because") {
      const auto verdict = value.cast<Verdict>();
      changes.emplace_back([=](Policy& policy, const ::c10d::Backend&) { policy.exact_because = verdict; });
    } else if (name == "_all_reduce_of") {
      const auto [of_group, text] = value.cast<std::pair<BackendPtr, std::string>>();
      const auto change = [only = of_group.get(), formats = HopFormats::parse(text)](Policy& policy,
                                                                                     const ::c10d::Backend& group) {
        if (&group == only) policy.all_reduce = formats;
      };
      changes.insert(changes.begin(), change);  // any field that names formats wins
    } else {
      changes.push_back(change_of(name, value));
    }
  }
  if (fields.contains("_gradients")) {  // sums of gradients in other calls have the formats that are in force by now
    const bool all_reduce = !fields.contains("all_reduce"), exchanges = !fields.contains("exchanges");
    changes.emplace_back([=](Policy& policy, const ::c10d::Backend&) {
      if (all_reduce && policy.all_reduce.is_exact()) policy.all_reduce = policy.reduce_scatter;
      if (exchanges && policy.exchanges.is_exact()) policy.all_to_all = policy.reduce_scatter;
    });
  }
  return result;
}

}  // namespace

Policy effective_policy(const Policy& policy, const ::c10d::Backend& group) {
  Policy effective = policy;
  if (at::impl::ThreadLocalPythonObjects::contains(kOverrideKey)) {
    const auto& stashed = at::impl::ThreadLocalPythonObjects::get(kOverrideKey);
    const py::gil_scoped_acquire gil;
    const py::handle object(stashed->ptr(&stashed->pyinterpreter()));
    if (!object.is_none()) effective = object.cast<const PolicyOverride&>().apply(std::move(effective), group);
  }
  effective.narrow_to(group.getGroupDesc());
  return effective;
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
      .def_readwrite("sample_errors_every", &ZcommOptions::sample_errors_every)
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
  module.def(
      "names_group",
      [](const std::string& pattern, const std::string& description) {
        return GroupRule{pattern, false, {}}.matches(description);
      },
      py::arg("pattern"), py::arg("description"));
}

}  // namespace zcomm::c10d_binding
