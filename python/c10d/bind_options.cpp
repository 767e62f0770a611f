// Options and PolicyOverride, whose fields are checked as they are set.
#include <pybind11/stl.h>

#include <limits>
#include <utility>

#include "bind.hpp"
#include "options.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

std::string refusal(const OptionField& field, const std::string& expected, const py::handle& value) {
  return std::string(field.name) + ": expected " + expected + ", got " + py::repr(value).cast<std::string>();
}

[[noreturn]] void refuse(const OptionField& field, const py::handle& value, const std::string& expected) {
  throw py::type_error(refusal(field, expected, value));
}

template <class Format>
void set_format(const OptionField& field, const py::handle& value, Format& target) {
  if (!py::isinstance<py::str>(value)) {
    refuse(field, value, "a format such as 'int8:256', 'int8:128/int4:128' or 'exact'");
  }
  try {
    target = Format::parse(value.cast<std::string>());
  } catch (const ArgumentError& error) {
    throw py::value_error(std::string(field.name) + ": " + error.what());
  }
}

void set(const OptionField& field, const py::handle& value, BlockFormat& target) { set_format(field, value, target); }
void set(const OptionField& field, const py::handle& value, HopFormats& target) {
  HopFormats formats;
  set_format(field, value, formats);
  if ((field.exact_only && !formats.is_exact()) || (formats.direct && !field.direct)) {
    throw py::value_error(std::string(field.name) + ": expected " +
                          (field.exact_only ? "'exact' or 'exact:direct'" : "a format that is not direct") + ", got '" +
                          formats.to_string() + "'");
  }
  target = formats;
}

void set(const OptionField& field, const py::handle& value, Choice& target) {
  if (!py::isinstance<py::str>(value)) refuse(field, value, "'always' or 'auto'");
  try {
    target = parse_choice(value.cast<std::string>());
  } catch (const ArgumentError& error) {
    throw py::value_error(std::string(field.name) + ": " + error.what());
  }
}

// The name of a file: quotes and backslashes would have to be escaped wherever options are shown.
void set(const OptionField& field, const py::handle& value, std::string& target) {
  if (!py::isinstance<py::str>(value)) refuse(field, value, "the name of a file");
  target = value.cast<std::string>();
  if (target.find_first_of("'\\\n") != std::string::npos) {
    throw py::value_error(refusal(field, "a name without quotes, backslashes and line ends", value));
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

// What text in an environment variable is read as.
const char* kind_of(const bool&) { return "flag"; }
const char* kind_of(const BlockFormat&) { return "text"; }
const char* kind_of(const HopFormats&) { return "text"; }
const char* kind_of(const Choice&) { return "text"; }
const char* kind_of(const std::string&) { return "text"; }
template <class Integer>
const char* kind_of(const Integer&) {
  return "integer";
}

py::object to_python(const BlockFormat& format) { return py::str(format.to_string()); }
py::object to_python(const HopFormats& formats) { return py::str(formats.to_string()); }
py::object to_python(Choice choice) { return py::str(std::string(to_string(choice))); }
template <class Value>
py::object to_python(const Value& value) {
  return py::cast(value);
}

std::string names_of(bool overridable) {
  std::string names;
  for_each_field([&](const OptionField& field, auto member) {
    if (is_overridable(member) == overridable) names += (names.empty() ? "" : ", ") + std::string(field.name);
  });
  return names;
}

// Sets the field of that name; returns its place in the table.
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
  if (!place) {
    throw py::type_error("unknown option '" + name + "'; accepted are " + names_of(true) + " (and, for Options, " +
                         names_of(false) + ")");
  }
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
    result->named.set(set_field(result->values, key.cast<std::string>(), value, true));
  }
  return result;
}

// A row of the table as Python has it.
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
      .def("handshake_text", [](const ZcommOptions& o) { return handshake_text(o); })
      .def(
          "__eq__",
          [](const ZcommOptions& a, const ZcommOptions& b) {
            return static_cast<const OptionValues&>(a) == static_cast<const OptionValues&>(b);
          },
          py::is_operator())
      .def("__hash__", [](const ZcommOptions& o) { return py::hash(py::str(to_string(o))); })
      .def("__repr__", [](const ZcommOptions& o) { return "zcomm.Options(" + to_string(o) + ")"; });

  py::class_<PolicyOverride>(module, "PolicyOverride").def(py::init(&make_override));
  module.attr("OVERRIDE_KEY") = kOverrideKey;
}

}  // namespace zcomm::c10d_binding
