// The communicator of one rank, in Python: over NCCL, or one of those that bind_local.cpp makes.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bind.hpp"
#include "bound_communicator.hpp"
#include "zcomm/nccl.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using std::chrono::milliseconds;

NcclUniqueId id_of(const std::string& bytes) {
  NcclUniqueId id;
  check_argument(bytes.size() == id.size(), [&] {
    return "unique_id: expected " + std::to_string(id.size()) + " bytes, got " + std::to_string(bytes.size());
  });
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

// Other ranks' threads may need the GIL while this one's connections end.
void end(BoundCommunicator* communicator) {
  if (PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    delete communicator;
  } else {
    delete communicator;
  }
}

std::shared_ptr<BoundCommunicator> connect(int rank, int size, const std::string& unique_id,
                                           const std::vector<int>& node_ids, int device, milliseconds timeout,
                                           std::size_t chunk_bytes, int max_ctas) {
  NcclOptions options;
  options.unique_id = id_of(unique_id);
  options.rank = rank;
  options.size = size;
  options.connect_timeout = timeout;
  options.max_ctas = max_ctas;
  const CudaDeviceGuard guard(device);
  auto workspace = make_cuda_workspace();
  auto codec = make_cuda_codec(*workspace);
  auto communicator = std::make_unique<Communicator>(make_nccl_transport(options), Topology(node_ids), std::move(codec),
                                                     std::move(workspace), chunk_bytes);
  return {new BoundCommunicator(std::move(communicator), device), end};
}

// Address, format, decay, whether it is empty.
using FeedbackTuple = std::tuple<std::uintptr_t, std::string, float, bool>;

Feedback feedback_of(const FeedbackTuple& tuple) {
  const auto& [address, format, decay, empty] = tuple;
  return {reinterpret_cast<std::byte*>(address), BlockFormat::parse(format), decay, empty};
}

using BoundClass = py::class_<BoundCommunicator, std::shared_ptr<BoundCommunicator>>;
using NoGil = py::call_guard<py::gil_scoped_release>;

// An attribute's old name, for one release: zcomm/_renamed.py does so for classes of Python.
std::uint64_t renamed(std::uint64_t value, const char* text) {
  if (PyErr_WarnEx(PyExc_DeprecationWarning, text, 1) != 0) throw py::error_already_set();
  return value;
}

void bind_call_stats(py::module_& module) {
  py::class_<CallStats>(module, "CallStats", "Bytes that one call sent from this rank.")
      .def_readonly("intra_node_bytes", &CallStats::intra_node_bytes, "To ranks of the same node.")
      .def_readonly("inter_node_bytes", &CallStats::inter_node_bytes, "To other nodes.")
      .def_property_readonly("wire_bytes", &CallStats::wire_bytes)
      .def_property_readonly("inside_bytes",
                             [](const CallStats& self) {
                               return renamed(self.intra_node_bytes,
                                              "CallStats.inside_bytes is now CallStats.intra_node_bytes");
                             })
      .def_property_readonly("between_bytes",
                             [](const CallStats& self) {
                               return renamed(self.inter_node_bytes,
                                              "CallStats.between_bytes is now CallStats.inter_node_bytes");
                             })
      .def("__repr__", [](const CallStats& self) {
        return "CallStats(intra_node_bytes=" + std::to_string(self.intra_node_bytes) +
               ", inter_node_bytes=" + std::to_string(self.inter_node_bytes) + ")";
      });
}

void bind_collectives(BoundClass& communicator_class) {
  const NoGil no_gil;
  communicator_class
      .def(
          "all_gather",
          [](BoundCommunicator& self, const ArrayTuple& shard, const std::vector<ArrayTuple>& slots,
             const NamedSegments& segments, milliseconds timeout, std::uintptr_t stream, std::uintptr_t reference) {
            return self.run([&](Communicator& communicator) {
              const auto parsed = parse_segments<BlockFormat>(segments);
              return communicator.all_gather(view_of(shard), views_of<TensorView>(slots), GatherSegments(parsed),
                                             timeout, stream_of(stream),
                                             {nullptr, reinterpret_cast<std::byte*>(reference)});
            });
          },
          py::arg("shard"), py::arg("slots"), py::arg("segments"), py::arg("timeout"), py::arg("stream") = 0,
          py::arg("reference") = 0, no_gil)
      .def(
          "reduce_scatter",
          [](BoundCommunicator& self, const std::vector<ArrayTuple>& slots, const ArrayTuple& output,
             const NamedSegments& segments, float factor, milliseconds timeout, std::uintptr_t stream) {
            return self.run([&](Communicator& communicator) {
              const auto parsed = parse_segments<HopFormats>(segments);
              return communicator.reduce_scatter(views_of<ConstTensorView>(slots), view_of(output),
                                                 ReduceSegments(parsed), factor, timeout, stream_of(stream));
            });
          },
          py::arg("slots"), py::arg("output"), py::arg("segments"), py::arg("factor"), py::arg("timeout"),
          py::arg("stream") = 0, no_gil)
      .def(
          "all_reduce",
          [](BoundCommunicator& self, const ArrayTuple& tensor, const std::string& formats, float factor,
             milliseconds timeout, std::uintptr_t stream) {
            return self.run([&](Communicator& communicator) {
              return communicator.all_reduce(view_of(tensor), HopFormats::parse(formats), factor, timeout,
                                             stream_of(stream));
            });
          },
          py::arg("tensor"), py::arg("formats"), py::arg("factor"), py::arg("timeout"), py::arg("stream") = 0, no_gil);
}

void bind_planned_collectives(BoundClass& communicator_class) {
  const NoGil no_gil;
  communicator_class
      .def(
          "plan_reduce_scatter",
          [](BoundCommunicator& self, const std::vector<ArrayTuple>& slots, const NamedSegments& segments,
             const std::string& feedback) {
            return self.run([&](Communicator& communicator) {
              return communicator.plan_reduce_scatter(shape_of(views_of<ConstTensorView>(slots)),
                                                      parse_segments<HopFormats>(segments),
                                                      BlockFormat::parse(feedback));
            });
          },
          py::arg("slots"), py::arg("segments"), py::arg("feedback"), no_gil)
      .def(
          "run_reduce_scatter",
          [](BoundCommunicator& self, const ReducePlan& plan, const std::vector<ArrayTuple>& slots,
             const ArrayTuple& output, float factor, milliseconds timeout, std::uintptr_t stream,
             const FeedbackTuple& feedback) {
            return self.run([&](Communicator& communicator) {
              const Feedback kept = feedback_of(feedback);
              return communicator.reduce_scatter(plan, views_of<ConstTensorView>(slots), view_of(output), factor,
                                                 timeout, stream_of(stream), &kept);
            });
          },
          py::arg("plan"), py::arg("slots"), py::arg("output"), py::arg("factor"), py::arg("timeout"),
          py::arg("stream") = 0, py::kw_only(), py::arg("feedback"), no_gil);
}

void bind_differences(py::module_& module, BoundClass& communicator_class) {
  const NoGil no_gil;
  py::class_<KeptShards>(module, "KeptShards", "What one rank keeps of them, in memory of the caller's.")
      .def(py::init([](std::uintptr_t address, std::size_t num_bytes) {
             auto kept = std::make_unique<KeptShards>();
             kept->values = {reinterpret_cast<std::byte*>(address), num_bytes};
             return kept;
           }),
           py::arg("address"), py::arg("num_bytes"))
      .def_property_readonly("generation", [](const KeptShards& kept) { return kept.generation.load(); })
      .def_property_readonly("sent_bytes", [](const KeptShards& kept) { return kept.sent_bytes.load(); });
  communicator_class
      .def(
          "plan_differences",
          [](BoundCommunicator& self, const std::vector<ArrayTuple>& slots) {
            return self.run([&](Communicator& communicator) {
              return communicator.plan_differences(shape_of(views_of<ConstTensorView>(slots)));
            });
          },
          py::arg("slots"), no_gil)
      .def(
          "all_gather_differences",
          [](BoundCommunicator& self, const DifferencePlan& plan, const ArrayTuple& shard,
             const std::vector<ArrayTuple>& slots, KeptShards& kept, milliseconds timeout) {
            return self.run([&](Communicator& communicator) {
              return communicator.all_gather(plan, view_of(shard), views_of<TensorView>(slots), kept, timeout);
            });
          },
          py::arg("plan"), py::arg("shard"), py::arg("slots"), py::arg("kept"), py::arg("timeout"), no_gil);
}

}  // namespace

void bind_communicator(py::module_& module) {
  const NoGil no_gil;
  bind_call_stats(module);
  BoundClass communicator_class(module, "Communicator");
  communicator_class.def_readonly("rank", &BoundCommunicator::rank)
      .def_readonly("size", &BoundCommunicator::size)
      .def_readonly("num_nodes", &BoundCommunicator::num_nodes)
      .def_property_readonly("is_closed", &BoundCommunicator::is_closed)
      .def(
          "set_seed",
          [](BoundCommunicator& self, std::uint64_t seed) {
            self.run([&](Communicator& communicator) {
              communicator.set_seed(seed);
              return 0;
            });
          },
          py::arg("seed"), no_gil)
      .def("abort", &BoundCommunicator::abort, py::arg("reason"), no_gil)
      .def("close", &BoundCommunicator::close, no_gil);
  bind_collectives(communicator_class);
  bind_planned_collectives(communicator_class);
  bind_differences(module, communicator_class);

  module.def("connect", &connect, py::arg("rank"), py::arg("size"), py::arg("unique_id"), py::arg("node_ids"),
             py::arg("device"), py::arg("timeout"), py::arg("chunk_bytes"), py::arg("max_ctas"), no_gil);
  module.def("make_unique_id", [] {
    const NcclUniqueId id = make_nccl_unique_id();
    return py::bytes(reinterpret_cast<const char*>(id.data()), id.size());
  });
  module.attr("DEFAULT_CHUNK_BYTES") = kDefaultChunkBytes;
  module.def("default_gpu_chunk_bytes", &default_gpu_chunk_bytes, py::arg("size"));
}

}  // namespace zcomm
