// What a user sets: the policy and how it is carried out.
#pragma once

#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct ZcommOptions : ::c10d::Backend::Options {
  ZcommOptions() : ::c10d::Backend::Options("zcomm") {}

  Policy policy;
  int node_size = 0;  // ranks per node, in rank order; 0: found from the launcher's environment or the host
  std::size_t chunk_bytes = kDefaultChunkBytes;
  std::uint64_t seed = 0;             // of stochastic rounding
  bool high_priority_stream = false;  // of asynchronous calls on a GPU
  bool blocking_wait = false;         // wait() on a GPU blocks the host; not compared between ranks
  std::int64_t telemetry_every = 0;   // calls of a site from one sample to the next; 0: none; not compared

  // One line that ranks compare and users read.
  std::string to_string() const;
};

// Changes to a policy for the calls of one thread, and of the autograd threads that it starts.
struct PolicyOverride {
  std::optional<BlockFormat> all_gather;
  std::optional<HopFormats> reduce_scatter;
  std::optional<HopFormats> all_reduce;
  std::optional<std::int64_t> min_bytes;
  std::optional<bool> out_of_place;
  std::optional<bool> lists;
  std::optional<bool> coalesced;
  std::optional<bool> strict;

  Policy apply(Policy policy) const;
};

// `policy` as changed by the override that is in force on this thread.
Policy effective_policy(const Policy& policy);

// The override in force on this thread is kept as a Python object under this name in torch's thread-local storage,
// which torch itself carries over to autograd threads.
inline constexpr const char* kOverrideKey = "zcomm.override";

}  // namespace zcomm::c10d_binding
