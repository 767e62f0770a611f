// Options and PolicyOverride, whose fields are checked as they are set.
#include "bind.hpp"
#include "options.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

std::int64_t integer_of(const std::string& name, const py::handle& value, std::int64_t least) {
  if (!py::isinstance<py::int_>(value) || py::isinstance<py::bool_>(value)) {
    throw py::type_error(name + ": got " + py::repr(value).cast<std::string>() + ", need an integer");
  }
  const auto number = value.cast<std::int64_t>();
  if (number < least) {
    throw py::value_error(name + ": got " + std::to_string(number) + ", need at least " + std::to_string(least));
  }
  return number;
}

// Fields that Options and PolicyOverride share, as text where the core has formats.
template <class Target>
void set_field(Target& target, const std::string& name, const py::handle& value) {
  const auto text = [&] { return value.cast<std::string>(); };
  const auto named = [&](auto&& parse) {
    try {
      return parse(text());
    } catch (const py::cast_error&) {
      throw py::type_error(name + ": got " + py::repr(value).cast<std::string>() +
                           ", need a format such as 'int8:256', 'int8:128/int4:128' or 'exact'");
    } catch (const ArgumentError& error) {
      throw py::value_error(name + ": " + error.what());
    }
  };
  const auto flag = [&] {
    if (!py::isinstance<py::bool_>(value)) {
      throw py::type_error(name + ": got " + py::repr(value).cast<std::string>() + ", need True or False");
    }
    return value.cast<bool>();
  };
  if (name == "all_gather") {
    target.all_gather = named(BlockFormat::parse);
  } else if (name == "reduce_scatter") {
    target.reduce_scatter = named(HopFormats::parse);
  } else if (name == "all_reduce") {
    target.all_reduce = named(HopFormats::parse);
  } else if (name == "min_bytes") {
    target.min_bytes = integer_of(name, value, 0);
  } else if (name == "out_of_place") {
    target.out_of_place = flag();
  } else if (name == "lists") {
    target.lists = flag();
  } else if (name == "coalesced") {
    target.coalesced = flag();
  } else if (name == "strict") {
    target.strict = flag();
  } else {
    throw py::type_error("unknown option '" + name +
                         "'; accepted are all_gather, reduce_scatter, all_reduce, min_bytes, out_of_place, lists, "
                         "coalesced, strict (and, for Options, node_size, chunk_bytes, seed, high_priority_stream, "
                         "blocking_wait, telemetry_every)");
  }
}

c10::intrusive_ptr<ZcommOptions> make_options(const py::kwargs& fields) {
  auto options = c10::make_intrusive<ZcommOptions>();
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "node_size") {
      options->node_size = value.is_none() ? 0 : static_cast<int>(integer_of(name, value, 1));
    } else if (name == "high_priority_stream" || name == "blocking_wait") {
      if (!py::isinstance<py::bool_>(value)) {
        throw py::type_error(name + ": got " + py::repr(value).cast<std::string>() + ", need True or False");
      }
      (name == "blocking_wait" ? options->blocking_wait : options->high_priority_stream) = value.cast<bool>();
    } else if (name == "telemetry_every") {
      options->telemetry_every = integer_of(name, value, 0);
    } else if (name == "chunk_bytes") {
      options->chunk_bytes = static_cast<std::size_t>(integer_of(name, value, 1));
    } else if (name == "seed") {
      options->seed = static_cast<std::uint64_t>(integer_of(name, value, 0));
    } else {
      set_field(options->policy, name, value);
    }
  }
  return options;
}

std::unique_ptr<PolicyOverride> make_override(const py::kwargs& fields) {
  auto result = std::make_unique<PolicyOverride>();
  for (const auto& [key, value] : fields) set_field(*result, key.cast<std::string>(), value);
  return result;
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<ZcommOptions, c10::intrusive_ptr<ZcommOptions>, ::c10d::Backend::Options>(module, "Options")
      .def(py::init(&make_options))
      .def_property_readonly("all_gather", [](const ZcommOptions& o) { return o.policy.all_gather.to_string(); })
      .def_property_readonly("reduce_scatter",
                             [](const ZcommOptions& o) { return o.policy.reduce_scatter.to_string(); })
      .def_property_readonly("all_reduce", [](const ZcommOptions& o) { return o.policy.all_reduce.to_string(); })
      .def_property_readonly("min_bytes", [](const ZcommOptions& o) { return o.policy.min_bytes; })
      .def_property_readonly("out_of_place", [](const ZcommOptions& o) { return o.policy.out_of_place; })
      .def_property_readonly("lists", [](const ZcommOptions& o) { return o.policy.lists; })
      .def_property_readonly("coalesced", [](const ZcommOptions& o) { return o.policy.coalesced; })
      .def_property_readonly("strict", [](const ZcommOptions& o) { return o.policy.strict; })
      .def_property_readonly(
          "node_size",
          [](const ZcommOptions& o) { return o.node_size == 0 ? std::nullopt : std::optional<int>(o.node_size); })
      .def_property_readonly("chunk_bytes", [](const ZcommOptions& o) { return o.chunk_bytes; })
      .def_property_readonly("seed", [](const ZcommOptions& o) { return o.seed; })
      .def_property_readonly("high_priority_stream", [](const ZcommOptions& o) { return o.high_priority_stream; })
      .def_property_readonly("blocking_wait", [](const ZcommOptions& o) { return o.blocking_wait; })
      .def_property_readonly("telemetry_every", [](const ZcommOptions& o) { return o.telemetry_every; })
      .def("__repr__", [](const ZcommOptions& o) { return "zcomm.Options(" + o.to_string() + ")"; });

  py::class_<PolicyOverride>(module, "PolicyOverride").def(py::init(&make_override));
  module.attr("OVERRIDE_KEY") = kOverrideKey;
}

}  // namespace zcomm::c10d_binding
