// What only Python can do: torch's own groups cannot be made in C++ outside of torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pointers.hpp"

namespace zcomm::c10d_binding {

struct PythonHooks {
  // Compares options, versions and node layout with all ranks; returns the node of every rank. Called once, at the
  // first collective of the group.
  std::function<std::vector<int>()> agree;
  // The inner group for exact calls on "cuda" tensors. Called once, at the first one.
  std::function<BackendPtr()> make_exact_cuda;
  // A Gloo group for compressed bytes alone, and the number of its connections between two ranks: an even number, of
  // which tags choose (tag % number). Called once, at the first compressed collective on CPU tensors.
  std::function<std::pair<BackendPtr, int>()> make_transport_group;
  // Waits until all ranks have come to their first compressed collective on GPU tensors; returns where the NCCL of the
  // installed wheel is, or nothing. Called once.
  std::function<std::string()> meet_for_nccl;
  // A zcomm backend for `ranks` of this group.
  std::function<BackendPtr(StorePtr, const std::vector<int>& ranks, c10::intrusive_ptr<::c10d::Backend::Options>)>
      split;
  // Seconds of an exact call and of a compressed one, by the calibration of the options, and of one in one hop, or 0 if
  // that is not another way. `again`: of two all-gathers, the second one from secondary shards. Empty without a
  // calibration.
  std::function<std::tuple<double, double, double>(const std::string& collective, const std::string& dtype,
                                                   std::int64_t num_bytes, const std::string& formats, bool again)>
      predict;
  // Called once, when the group ends. May be empty.
  std::function<void()> at_shutdown;
};

// Throws the exception of Python that is being handled as a TransportError with its text alone; any other again.
[[noreturn]] void rethrow_from_python();

// hook(), whose exceptions become TransportErrors.
template <class Result>
Result call_python(const std::function<Result()>& hook) {
  try {
    return hook();
  } catch (...) {
    rethrow_from_python();
  }
}

}  // namespace zcomm::c10d_binding
