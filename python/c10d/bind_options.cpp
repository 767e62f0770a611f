// Python bindings of Options and PolicyOverride, whose fields are checked when they are set.
#include <pybind11/stl.h>

#include <limits>
#include <sstream>
#include <type_traits>
#include <utility>

#include "bind.hpp"
#include "nccl_variables.hpp"
#include "options.hpp"
#include "pointers.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

std::string refusal(const OptionField& field, const std::string& expected, const py::handle& value) {
  return std::string(field.name) + ": expected " + expected + ", got " + py::repr(value).cast<std::string>();
}

[[noreturn]] void refuse(const OptionField& field, const py::handle& value, const std::string& expected) {
  throw py::type_error(refusal(field, expected, value));
}

// `parse` throws ArgumentError.
template <class Value, class Parse>
void set_parsed(const OptionField& field, Value& target, Parse&& parse) {
  try {
    target = parse();
  } catch (const ArgumentError& error) {
    throw py::value_error(std::string(field.name) + ": " + error.what());
  }
}

template <class Format>
void set_format(const OptionField& field, const py::handle& value, Format& target, const std::string& examples) {
  if (!py::isinstance<py::str>(value)) refuse(field, value, "a format such as " + examples);
  set_parsed(field, target, [&] { return Format::parse(value.cast<std::string>()); });
}

void set(const OptionField& field, const py::handle& value, BlockFormat& target) {
  if (py::isinstance<py::str>(value) && value.cast<std::string>().find('/') != std::string::npos) {
    throw py::value_error(refusal(field, "one format", value) + ": broadcast and all_gather take one");
  }
  set_format(field, value, target, "'int8:256' or 'exact'");
}
void set(const OptionField& field, const py::handle& value, HopFormats& target) {
  set_format(field, value, target, "'int8:256', 'int8:128/int4:128' or 'exact'");
}

void set(const OptionField& field, const py::handle& value, Choice& target) {
  if (!py::isinstance<py::str>(value)) refuse(field, value, "'always' or 'auto'");
  set_parsed(field, target, [&] { return parse_choice(value.cast<std::string>()); });
}

// A sequence of names, or one text with commas.
void set(const OptionField& field, const py::handle& value, Forms& target) {
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
      refuse(field, value, "names of forms");
    }
    for (const py::handle item : value) {
      if (!py::isinstance<py::str>(item)) refuse(field, value, "names of forms");
      add(item.cast<std::string>());
    }
  }
  set_parsed(field, target, [&] { return Forms::parse(names); });
}

// Rejects quotes and backslashes, which would need escapes wherever options are shown.
void set(const OptionField& field, const py::handle& value, std::string& target) {
  if (!py::isinstance<py::str>(value)) refuse(field, value, field.holds);
  target = value.cast<std::string>();
  if (target.find_first_of("'\\\n") != std::string::npos) {
    throw py::value_error(
        refusal(field, std::string(field.holds) + " without quotes, backslashes and line ends", value));
  }
}

void set(const OptionField& field, const py::handle& value, bool& target) {
  if (!py::isinstance<py::bool_>(value)) refuse(field, value, "True or False");
  target = value.cast<bool>();
}

template <class Integer>
void set(const OptionField& field, const py::handle& value, Integer& target) {
  if (!py::isinstance<py::int_>(value) || py::isinstance<py::bool_>(value)) refuse(field, value, "an integer");
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0 || number < field.least || !std::in_range<Integer>(number)) {
    const bool too_large = overflow > 0 || number > field.least;
    throw py::value_error(refusal(field,
                                  too_large ? "at most " + std::to_string(std::numeric_limits<Integer>::max())
                                            : "at least " + std::to_string(field.least),
                                  value));
  }
  target = static_cast<Integer>(number);
}

void set(const OptionField& field, const py::handle& value, std::optional<int>& target) {
  target.reset();
  if (!value.is_none()) set(field, value, target.emplace());
}

// Names the type that an environment variable's text is parsed as.
template <class Value>
const char* kind_of(const Value&) {
  if (std::is_same_v<Value, bool>) return "flag";
  return std::is_integral_v<Value> || std::is_same_v<Value, std::optional<int>> ? "integer" : "text";
}

py::object to_python(const BlockFormat& format) { return py::str(format.to_string()); }
py::object to_python(const HopFormats& formats) { return py::str(formats.to_string()); }
py::object to_python(Choice choice) { return py::str(std::string(to_string(choice))); }
py::object to_python(const Forms& forms) { return py::tuple(py::cast(forms.names())); }
template <class Value>
py::object to_python(const Value& value) {
  return py::cast(value);
}

// Returns all fields as Python would write them.
std::string text_of(const OptionValues& values) {
  std::string text;
  for_each_field([&](const OptionField& field, auto member) {
    const std::string value = py::repr(to_python(member_of(values, member)));
    text += (text.empty() ? "" : ", ") + std::string(field.name) + "=" + value;
  });
  return text;
}

// Sets the field `name`; returns its index in the table.
std::size_t set_field(OptionValues& values, const std::string& name, const py::handle& value, bool overriding) {
  std::optional<std::size_t> place;
  std::size_t row = 0;
  for_each_field([&](const OptionField& field, auto member) {
    if (name == field.name && (!overriding || is_overridable(member))) {
      set(field, value, member_of(values, member));
      place = row;
    }
    ++row;
  });
  if (!place) throw py::type_error(name + ": expected an option, got none of that name");
  return *place;
}

c10::intrusive_ptr<ZcommOptions> make_options(const py::kwargs& fields) {
  auto options = c10::make_intrusive<ZcommOptions>();
  for (const auto& [key, value] : fields) set_field(*options, key.cast<std::string>(), value, false);
  return options;
}

std::unique_ptr<PolicyOverride> make_override(const py::kwargs& fields) {
  auto result = std::make_unique<PolicyOverride>();
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "_drops_traced") {
      result->drops_traced = value.cast<bool>();
    } else if (name == "_exact_because") {
      result->exact_because = value.cast<Verdict>();
    } else if (name == "_all_reduce_of") {
      const auto [group, formats] = value.cast<std::pair<BackendPtr, std::string>>();
      result->all_reduce_of = {group.get(), HopFormats::parse(formats)};
    } else {
      result->named.set(set_field(result->values, name, value, true));
    }
  }
  return result;
}

// Row of the table in Python.
struct NamedField {
  OptionField field;
  const char* kind;
  bool overridable;
};

}  // namespace

void bind_options(py::module_& module) {
  py::class_<NamedField>(module, "OptionField")
      .def_property_readonly("name", [](const NamedField& row) { return row.field.name; })
      .def_readonly("kind", &NamedField::kind)
      .def_readonly("overridable", &NamedField::overridable)
      .def_property_readonly("compared", [](const NamedField& row) { return row.field.compared; });
  py::class_<ZcommOptions, c10::intrusive_ptr<ZcommOptions>, ::c10d::Backend::Options> options(module, "Options");
  py::list rows;
  for_each_field([&](const OptionField& field, auto member) {
    options.def_property_readonly(field.name,
                                  [member](const ZcommOptions& o) { return to_python(member_of(o, member)); });
    rows.append(NamedField{field, kind_of(member_of(OptionValues{}, member)), is_overridable(member)});
  });
  module.attr("OPTION_FIELDS") = py::tuple(rows);
  options.def(py::init(&make_options))
      .def(
          "__eq__",
          [](const ZcommOptions& a, const ZcommOptions& b) {
            return static_cast<const OptionValues&>(a) == static_cast<const OptionValues&>(b);
          },
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
  module.def("has_high_priority", &has_high_priority);
}

}  // namespace zcomm::c10d_binding
