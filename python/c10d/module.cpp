// zcomm._c10d: the torch.distributed side in Python. See zcomm/distributed/backend.py for its use.
#include <torch/csrc/utils/pybind.h>
//
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "measure.hpp"
#include "process_group.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

namespace zcomm::c10d_binding {
namespace {

template <class T>
using intrusive_class = py::class_<T, c10::intrusive_ptr<T>, ::c10d::Backend>;

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

py::dict stats_of(ProcessGroup& group) {
  constexpr std::array kCollectives{Collective::all_gather, Collective::reduce_scatter, Collective::all_reduce};
  const auto calls_dict = [](const Stats::Calls& calls) {
    return py::dict(py::arg("calls") = calls.calls.load(), py::arg("bytes") = calls.bytes.load());
  };
  Stats& stats = group.stats();
  py::dict all;
  for (const Collective collective : kCollectives) {
    const Stats::Compressed& cost = stats.compressed(collective);
    const Stats::Calls& compressed = stats.calls(collective, Verdict::compressed);
    py::dict exact;
    for (int i = 1; i < kNumVerdicts; ++i) {
      const Stats::Calls& calls = stats.calls(collective, static_cast<Verdict>(i));
      if (calls.calls.load() > 0) exact[py::str(std::string(to_string(static_cast<Verdict>(i))))] = calls_dict(calls);
    }
    all[py::str(std::string(to_string(collective)))] = py::dict(
        py::arg("calls") = compressed.calls.load(), py::arg("bytes") = compressed.bytes.load(),
        py::arg("inside_bytes") = cost.inside_bytes.load(), py::arg("between_bytes") = cost.between_bytes.load(),
        py::arg("codec_seconds") = static_cast<double>(cost.codec_ns.load()) * 1e-9,
        py::arg("transfer_seconds") = static_cast<double>(cost.transfer_ns.load()) * 1e-9, py::arg("exact") = exact);
  }
  all["others"] = calls_dict(stats.others);
  return all;
}

py::list losses_of(ProcessGroup& group) {
  std::vector<Loss> losses;
  {
    const py::gil_scoped_release no_gil;
    losses = group.telemetry().read();
  }
  py::list all;
  for (const Loss& loss : losses) {
    all.append(py::dict(
        py::arg("collective") = std::string(to_string(loss.collective)), py::arg("site") = loss.site,
        py::arg("hop") = loss.hop, py::arg("format") = loss.format, py::arg("calls") = loss.calls,
        py::arg("samples") = loss.samples, py::arg("elements") = loss.elements, py::arg("blocks") = loss.blocks,
        py::arg("finite_blocks") = loss.finite_blocks, py::arg("nonzero") = loss.nonzero,
        py::arg("zeroed") = loss.zeroed, py::arg("signal") = loss.signal, py::arg("noise") = loss.noise,
        py::arg("block_errors") = loss.block_errors, py::arg("largest_block_error") = loss.largest_block_error));
  }
  return all;
}

}  // namespace

PYBIND11_MODULE(_c10d, module) {
  py::module_::import("torch.distributed");
  module.attr("torch_version") = ZCOMM_TORCH_VERSION;

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

  py::class_<Site, SitePtr>(module, "Site")
      .def(py::init<std::string, std::vector<std::string>>(), py::arg("name"), py::arg("parts"))
      .def_readonly("name", &Site::name)
      .def_property_readonly("calls", [](const Site& site) { return site.calls.load(); })
      .def_property_readonly("inside_bytes", [](const Site& site) { return site.cost.inside_bytes.load(); })
      .def_property_readonly("between_bytes", [](const Site& site) { return site.cost.between_bytes.load(); });

  // What samples on a GPU go through, for the tests: it runs on CPU tensors as well.
  module.def("measure_on_device", [](const at::Tensor& original, const at::Tensor& decoded) {
    const Measured measured = measure_on_device(original, decoded);
    return py::make_tuple(measured.totals, measured.largest);
  });

  intrusive_class<ProcessGroup>(module, "ProcessGroup")
      .def(py::init([](BackendPtr exact_cpu, StorePtr store, c10::intrusive_ptr<ZcommOptions> options,
                       std::function<std::vector<int>()> agree, std::function<BackendPtr()> make_exact_cuda,
                       std::function<BackendPtr()> make_transport_group, std::function<std::string()> meet_for_nccl,
                       decltype(Host::split) split, std::function<void()> at_shutdown) {
             return c10::make_intrusive<ProcessGroup>(
                 std::move(exact_cpu), std::move(store), std::move(options),
                 Host{std::move(agree), std::move(make_exact_cuda), std::move(make_transport_group),
                      std::move(meet_for_nccl), std::move(split), std::move(at_shutdown)});
           }),
           py::arg("exact_cpu"), py::arg("store"), py::arg("options"), py::arg("agree"), py::arg("make_exact_cuda"),
           py::arg("make_transport_group"), py::arg("meet_for_nccl"), py::arg("split"), py::arg("at_shutdown"))
      .def_property_readonly("options", &ProcessGroup::options)
      .def("split", &ProcessGroup::split, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroup::shutdown, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_aborted", &ProcessGroup::is_aborted)
      .def_property_readonly("is_strict", &ProcessGroup::is_strict)
      // torch calls it on ranks that are not in a new group; children have connections of their own, so there is
      // nothing that these ranks take part in.
      .def("perform_nocolor_split", [](ProcessGroup&, const py::object&) {})
      .def("gather_format", &ProcessGroup::gather_format, py::arg("output"), py::arg("input"), py::arg("format") = "",
           py::call_guard<py::gil_scoped_release>())
      .def("reduce_format", &ProcessGroup::reduce_format, py::arg("output"), py::arg("input"), py::arg("op"),
           py::arg("formats") = "", py::call_guard<py::gil_scoped_release>())
      .def("all_gather_segments", &ProcessGroup::all_gather_segments, py::arg("output"), py::arg("input"),
           py::arg("segments"), py::arg("secondary"), py::arg("reference"), py::arg("site"), py::arg("async_op"),
           py::call_guard<py::gil_scoped_release>())
      .def("reduce_scatter_segments", &ProcessGroup::reduce_scatter_segments, py::arg("output"), py::arg("input"),
           py::arg("op"), py::arg("segments"), py::arg("feedback"), py::arg("site"), py::arg("async_op"),
           py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_feedback", &ProcessGroup::all_reduce_feedback, py::arg("tensor"), py::arg("op"),
           py::arg("formats"), py::arg("feedback"), py::arg("async_op"), py::call_guard<py::gil_scoped_release>())
      .def("feedback_bytes", &ProcessGroup::feedback_bytes, py::arg("input"), py::arg("segments"), py::arg("format"),
           py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_feedback_bytes", &ProcessGroup::all_reduce_feedback_bytes, py::arg("tensor"), py::arg("formats"),
           py::arg("format"), py::call_guard<py::gil_scoped_release>())
      .def("all_reduce_format", &ProcessGroup::all_reduce_format, py::arg("tensor"), py::arg("op"), py::arg("formats"),
           py::call_guard<py::gil_scoped_release>())
      .def("secondary_bytes", &ProcessGroup::secondary_bytes, py::arg("output"), py::arg("segments"),
           py::call_guard<py::gil_scoped_release>())
      .def("gather_secondary", &ProcessGroup::gather_secondary, py::arg("output"), py::arg("secondary"),
           py::arg("segments"), py::arg("site"), py::arg("async_op"), py::call_guard<py::gil_scoped_release>())
      .def("set_step", &ProcessGroup::set_step, py::arg("step"))
      .def("stats", &stats_of)
      .def("losses", &losses_of);
}

}  // namespace zcomm::c10d_binding
