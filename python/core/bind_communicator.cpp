// Python bindings of the communicator of one rank, over NCCL or between threads.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "bind.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/exchange.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/nccl.hpp"

namespace py = pybind11;

namespace zcomm {
namespace {

using std::chrono::milliseconds;

// Communicator for one call at a time, with its GPU current, until it is closed. Methods run without the GIL.
class BoundCommunicator {
 public:
  // Takes a GPU's index or kHost as `device`.
  BoundCommunicator(std::unique_ptr<Communicator> communicator, int device)
      : world(communicator->world()), device_(device), communicator_(std::move(communicator)) {}

  ~BoundCommunicator() {
    try {
      close();
    } catch (const std::exception&) {  // its GPU is gone
    }
  }

  template <class Call>
  auto run(Call&& call) {
    const std::lock_guard one_at_a_time(calls_);
    const auto guard = make_current(device_);
    check_argument(!is_closed_, [] { return std::string("this communicator is closed"); });
    return call(*communicator_);
  }

  // Also ends a close() that waits.
  void abort(const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (communicator_ != nullptr) communicator_->abort(reason);
  }

  // Closes after any call that is in progress in another thread.
  void close() {
    is_closed_ = true;
    const std::lock_guard no_call(calls_);
    if (communicator_ == nullptr) return;
    const auto guard = make_current(device_);
    communicator_->finish();
    std::unique_ptr<Communicator> last;
    {
      const std::lock_guard lock(mutex_);
      last = std::move(communicator_);
    }
  }

  bool is_closed() const { return is_closed_; }

  const World world;

 private:
  const int device_;
  std::atomic<bool> is_closed_{false};
  std::mutex calls_;
  std::mutex mutex_;  // guards the pointer against abort(); changes need calls_, too
  std::unique_ptr<Communicator> communicator_;
};

NcclUniqueId id_of(const std::string& bytes) {
  NcclUniqueId id;
  check_argument(bytes.size() == id.size(), "unique_id: expected ", id.size(), " bytes, got ", bytes.size());
  std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

py::bytes bytes_of(const NcclUniqueId& id) { return {reinterpret_cast<const char*>(id.data()), id.size()}; }

// Releases the GIL, which other ranks' threads may need while this one's connections end.
void end(BoundCommunicator* communicator) {
  if (PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    delete communicator;
  } else {
    delete communicator;
  }
}

// Throws at Ctrl-C.
void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<BoundCommunicator> connect(int rank, int size, const std::string& unique_id,
                                           const std::vector<int>& node_ids, int device, milliseconds timeout,
                                           std::size_t chunk_bytes, bool connect_all) {
  const Topology topology(node_ids);
  check_argument(topology.size() == size, "node_ids: expected ", size, " identifiers, got ", topology.size());
  NcclOptions options;
  options.unique_id = id_of(unique_id);
  options.rank = rank;
  if (connect_all) options.peers = topology.others(rank);
  options.connect_timeout = timeout;
  options.interruption = [] {
    check_signals();
    return std::string();
  };
  const CudaDeviceGuard guard(device);
  auto communicator = make_nccl_communicator(topology, std::move(options), chunk_bytes);
  return {new BoundCommunicator(std::move(communicator), device), end};
}

// Makes the communicators of ranks that are threads of this process.
std::vector<std::shared_ptr<BoundCommunicator>> make_local_communicators(const std::vector<int>& node_ids,
                                                                         std::size_t chunk_bytes) {
  std::vector<std::shared_ptr<BoundCommunicator>> communicators;
  for (auto& transport : make_local_transports(static_cast<int>(node_ids.size()))) {
    communicators.push_back(std::make_shared<BoundCommunicator>(
        std::make_unique<Communicator>(std::move(transport), Topology(node_ids), make_cpu_codec(),
                                       make_host_workspace(), chunk_bytes),
        kHost));
  }
  return communicators;
}

// Address, format, decay, and whether it is empty.
using FeedbackTuple = std::tuple<std::uintptr_t, std::string, float, bool>;

Feedback feedback_of(const FeedbackTuple& tuple) {
  const auto& [address, format, decay, empty] = tuple;
  return {reinterpret_cast<std::byte*>(address), BlockFormat::parse(format), decay, empty};
}

using BoundClass = py::class_<BoundCommunicator, std::shared_ptr<BoundCommunicator>>;
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_operation(py::module_& module) {
  py::class_<CallStats>(module, "CallStats", "Bytes that one call sent from this rank.")
      .def_readonly("intra_node_bytes", &CallStats::intra_node_bytes, "To ranks of the same node.")
      .def_readonly("inter_node_bytes", &CallStats::inter_node_bytes, "To other nodes.")
      .def_property_readonly("wire_bytes", &CallStats::wire_bytes)
      .def("__repr__", [](const CallStats& self) {
        return "CallStats(intra_node_bytes=" + std::to_string(self.intra_node_bytes) +
               ", inter_node_bytes=" + std::to_string(self.inter_node_bytes) + ")";
      });
  py::class_<SecondaryShard, std::shared_ptr<SecondaryShard>>(
      module, "SecondaryShard", "What one rank keeps of gathers, in memory of the caller's.")
      .def(py::init([](std::uintptr_t address, std::size_t num_bytes) {
             auto secondary = std::make_shared<SecondaryShard>();
             secondary->memory = {reinterpret_cast<std::byte*>(address), num_bytes};
             return secondary;
           }),
           py::arg("address"), py::arg("num_bytes"))
      .def_property_readonly("generation", [](const SecondaryShard& secondary) { return secondary.generation.load(); })
      .def_property_readonly("sent_bytes", [](const SecondaryShard& secondary) { return secondary.sent_bytes.load(); });
  py::class_<Operation, OperationPtr>(module, "Operation",
                                      "A collective that is ready to be called. See operation.hpp.")
      .def_property_readonly("description", &Operation::description)
      .def_property_readonly("secondary_bytes", [](const Operation& operation) { return operation.memory().secondary; })
      .def_property_readonly("residual_bytes", [](const Operation& operation) { return operation.memory().residual; });
  py::class_<Gather, Operation, GatherPtr>(module, "Gather", "A gather, which may keep a secondary shard.")
      .def("bound_to", &Gather::bound_to, py::arg("secondary"));
}

// `slots`, of which only lengths and dtype matter.
SlotShape shape_of_arrays(const std::vector<ArrayTuple>& slots) { return shape_of(views_of<ConstTensorView>(slots)); }

// Makes a gather or scatter of arrays like `part` at each rank.
template <ExchangePlan (*plan)(World, int, std::int64_t, DType, HopFormats)>
OperationPtr make_planned(const BoundCommunicator& self, int root, const ArrayTuple& part, const std::string& formats) {
  const TensorView view = view_of(part);
  return make_exchange(plan(self.world, root, view.num_elements, view.dtype, HopFormats::parse(formats)));
}

void bind_makers(BoundClass& communicator_class) {
  communicator_class
      .def(
          "make_all_gather",
          [](const BoundCommunicator& self, const std::vector<ArrayTuple>& slots, const NamedSegments& segments) {
            return make_all_gather(std::make_shared<const GatherPlan>(self.world, shape_of_arrays(slots),
                                                                      parse_segments<BlockFormat>(segments)));
          },
          py::arg("slots"), py::arg("segments"))
      .def(
          "make_lossless_gather",
          [](const BoundCommunicator& self, const std::vector<ArrayTuple>& slots) {
            return make_lossless_gather(std::make_shared<const LosslessPlan>(self.world, shape_of_arrays(slots)));
          },
          py::arg("slots"))
      .def(
          "make_reduce_scatter",
          [](const BoundCommunicator& self, const std::vector<ArrayTuple>& slots, const NamedSegments& segments,
             const std::optional<std::string>& feedback) {
            return make_reduce_scatter({self.world, shape_of_arrays(slots), parse_segments<HopFormats>(segments),
                                        feedback ? std::optional(BlockFormat::parse(*feedback)) : std::nullopt});
          },
          py::arg("slots"), py::arg("segments"), py::arg("feedback") = py::none())
      .def(
          "make_all_reduce",
          [](const BoundCommunicator& self, const ArrayTuple& tensor, const std::string& formats) {
            const TensorView view = view_of(tensor);
            return make_all_reduce({self.world, view.num_elements, view.dtype, HopFormats::parse(formats)});
          },
          py::arg("tensor"), py::arg("formats"))
      .def(
          "make_all_to_all",
          [](const BoundCommunicator& self, const std::vector<ArrayTuple>& inputs,
             const std::vector<ArrayTuple>& outputs, const std::string& formats) {
            const SlotShape sent = shape_of_arrays(inputs);
            return make_exchange(ExchangePlan::all_to_all(self.world, sent.lengths, shape_of_arrays(outputs).lengths,
                                                          sent.dtype, HopFormats::parse(formats)));
          },
          py::arg("inputs"), py::arg("outputs"), py::arg("formats"))
      .def("make_gather", &make_planned<&ExchangePlan::gather>, py::arg("root"), py::arg("part"), py::arg("formats"))
      .def("make_scatter", &make_planned<&ExchangePlan::scatter>, py::arg("root"), py::arg("part"), py::arg("formats"))
      .def(
          "make_broadcast",
          [](const BoundCommunicator& self, int root, const ArrayTuple& values, const std::string& format) {
            const TensorView view = view_of(values);
            return make_broadcast(self.world, root, view.num_elements, view.dtype, BlockFormat::parse(format));
          },
          py::arg("root"), py::arg("values"), py::arg("format"))
      .def(
          "make_message",
          [](const BoundCommunicator& self, int source, int target, const ArrayTuple& values,
             const std::string& formats) {
            const TensorView view = view_of(values);
            return make_exchange(ExchangePlan::message(self.world, source, target, view.num_elements, view.dtype,
                                                       HopFormats::parse(formats)));
          },
          py::arg("source"), py::arg("target"), py::arg("values"), py::arg("formats"));
}

CallStats run(BoundCommunicator& self, Operation& operation, const std::vector<ArrayTuple>& inputs,
              const std::vector<ArrayTuple>& outputs, milliseconds timeout, std::uintptr_t stream, float factor,
              const std::optional<FeedbackTuple>& feedback) {
  return self.run([&](Communicator& communicator) {
    const std::vector<ConstTensorView> read = views_of<ConstTensorView>(inputs);
    const std::vector<TensorView> written = views_of<TensorView>(outputs);
    const Feedback error_feedback = feedback ? feedback_of(*feedback) : Feedback{};
    return communicator.run(operation, {read, written, factor, feedback ? &error_feedback : nullptr}, timeout,
                            stream_of(stream));
  });
}

}  // namespace

void bind_communicator(py::module_& module) {
  const NoGil no_gil;
  bind_operation(module);
  BoundClass communicator_class(module, "Communicator");
  communicator_class.def_property_readonly("rank", [](const BoundCommunicator& self) { return self.world.rank; })
      .def_property_readonly("size", [](const BoundCommunicator& self) { return self.world.topology.size(); })
      .def_property_readonly("num_nodes", [](const BoundCommunicator& self) { return self.world.topology.num_nodes(); })
      .def_property_readonly("is_closed", &BoundCommunicator::is_closed)
      .def(
          "set_seed",
          [](BoundCommunicator& self, std::uint64_t seed) {
            self.run([&](Communicator& communicator) { communicator.set_seed(seed); });
          },
          py::arg("seed"), no_gil)
      .def("abort", &BoundCommunicator::abort, py::arg("reason"), no_gil)
      .def("close", &BoundCommunicator::close, no_gil);
  bind_makers(communicator_class);
  communicator_class.def("run", &run, py::arg("operation"), py::arg("inputs"), py::arg("outputs"), py::arg("timeout"),
                         py::arg("stream") = 0, py::kw_only(), py::arg("factor") = 1.0f,
                         py::arg("feedback") = py::none(), no_gil);

  module.def("connect", &connect, py::arg("rank"), py::arg("size"), py::arg("unique_id"), py::arg("node_ids"),
             py::arg("device"), py::arg("timeout"), py::arg("chunk_bytes"), py::arg("connect_all"), no_gil);
  module.def("make_local_communicators", &make_local_communicators, py::arg("node_ids"), py::arg("chunk_bytes"));
  module.def("make_unique_id", [] { return bytes_of(make_nccl_unique_id()); });
  module.def(
      "bootstrap_over_nccl",
      [](std::uintptr_t pointer, std::uint64_t token, milliseconds timeout) {
        NcclBootstrap met;
        {
          const py::gil_scoped_release no_gil;
          met = bootstrap_over_nccl(reinterpret_cast<void*>(pointer), token, timeout, check_signals);
        }
        return std::tuple(met.rank, met.device, bytes_of(met.unique_id), met.tokens);
      },
      py::arg("communicator"), py::arg("token"), py::arg("timeout"));
  module.attr("DEFAULT_CHUNK_BYTES") = kDefaultChunkBytes;
  module.attr("DEFAULT_GPU_CHUNK_BYTES") = kDefaultGpuChunkBytes;
}

}  // namespace zcomm
