// Python callbacks of the backend, as torch's own groups can only be made from Python, and Python's global lock.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pointers.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {

struct PythonHooks {
  // Compares options and versions of all ranks; returns the node of every rank. Called once, at the first collective of
  // the group.
  std::function<std::vector<int>()> agree;
  // Makes the inner group for exact calls on "cuda" tensors. Called once, at the first one.
  std::function<BackendPtr()> make_exact_cuda;
  // Makes a Gloo group for compressed bytes alone, with `each_way` connections from a rank to another. Also returns its
  // number of connections between two ranks, an even number that tags select from (tag % number), and a store for its
  // use. Called at the first compressed collective on CPU tensors, and again if that fails.
  std::function<std::tuple<BackendPtr, int, StorePtr>(int each_way)> make_transport_group;
  // Loads NCCL and waits until all ranks reach their first compressed collective on GPU tensors. Returns the bytes of
  // their NcclUniqueId, and a store for the transport.
  std::function<std::pair<std::string, StorePtr>()> meet_for_nccl;
  // Store of the watch for messages between two ranks: see SendRecv.
  StorePtr message_store;
  // Makes a zcomm backend for `ranks` of this group.
  std::function<BackendPtr(StorePtr, const std::vector<int>& ranks, c10::intrusive_ptr<::c10d::Backend::Options>)>
      split;
  // Looks up, in the table of the option "decisions", the seconds of an exact call, of a compressed one, and of one in
  // one hop (0 if that is not another way); nothing if the table lacks such calls. `again`: for two all-gathers, the
  // second one from secondary shards. Empty without a table.
  using Seconds = std::tuple<double, double, double>;
  std::function<std::optional<Seconds>(std::int64_t num_bytes, const std::string& device, const std::string& collective,
                                       const std::string& dtype, const std::string& formats, bool again)>
      look_up;
  // Returns the time in nanoseconds, by which steps are compared.
  std::function<std::int64_t()> now;
  // Called after each decision by the times of steps: see StepChoice.
  std::function<void()> decided;
  // Called by one rank of a node whose ranks could share memory but do not, with the reason.
  std::function<void(const std::string&)> no_node_memory;
  // Called once, when the group ends. May be empty.
  std::function<void()> at_shutdown;
};

// Releases Python's lock for its lifetime: used around all waits for other threads, which may need the lock.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

// Returns the hook's result. A Python error becomes a TransportError with its text.
template <class Hook, class... Arguments>
auto call_python(const Hook& hook, Arguments&&... arguments) {
  try {
    return hook(std::forward<Arguments>(arguments)...);
  } catch (pybind11::error_already_set& error) {
    const pybind11::gil_scoped_acquire gil;
    if (!error.matches(PyExc_Exception)) throw;          // Ctrl-C or exit
    throw TransportError(pybind11::str(error.value()));  // what() would append a traceback
  }
}

}  // namespace zcomm::c10d_binding
