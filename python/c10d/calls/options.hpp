// Options: the policy and settings of its execution.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d/base/torch_version.hpp"
#include "c10d/policy/policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

// Which compressed calls of a group have checksums. Messages between two ranks have theirs in samples, too.
enum class Verify : std::uint8_t { none, all, sample };
inline constexpr std::uint64_t kVerifiedEvery = 16;  // of a sample

// Options of one group.
struct ZcommOptions : ::c10d::Backend::Options {
  ZcommOptions() : ::c10d::Backend::Options("zcomm") {}
#if ZCOMM_HAS_CLONED_OPTIONS
  c10::intrusive_ptr<Options> clone() const override { return c10::make_intrusive<ZcommOptions>(*this); }
#endif

  Policy policy;
  std::optional<int> node_size;    // ranks per node, in rank order; empty: found from the launcher or the host
  std::optional<int> chunk_bytes;  // empty: kDefaultChunkBytes, or on a GPU kDefaultGpuChunkBytes
  Verify verify = Verify::none;
  std::int64_t sample_errors_every = 0;  // no option: calls of a site from one sample to the next; 0: none
  std::string decisions;                 // a file that Choice::automatic decides by; empty: it measures

  // Throws ValueError if an option does not support compressed calls of tensors there.
  void check_device(bool on_host) const {
    TORCH_CHECK_VALUE(verify == Verify::none || on_host, "zcomm: verify: expected False for a tensor on a GPU, got ",
                      verify == Verify::all ? "True" : "'sample'", ": messages over NCCL have no checksums");
  }
};

// Table of options: calls visit(name, pointer to the member) for each. Members of Policy can be overridden. Arguments,
// properties, repr, environment variables, overrides and the handshake follow from it.
template <class Visit>
void for_each_field(Visit&& visit) {
  visit("compress", &Policy::choice);
  visit("all_gather", &Policy::all_gather);
  visit("reduce_scatter", &Policy::reduce_scatter);
  visit("all_reduce", &Policy::all_reduce);
  visit("exchanges", &Policy::exchanges);
  visit("min_bytes", &Policy::min_bytes);
  visit("forms", &Policy::forms);
  visit("groups", &Policy::groups);
  visit("strict", &Policy::strict);
  visit("node_size", &ZcommOptions::node_size);
  visit("chunk_bytes", &ZcommOptions::chunk_bytes);
  visit("decisions", &ZcommOptions::decisions);
  visit("verify", &ZcommOptions::verify);
}

// Changes to the policy for the calls of one thread, and of the autograd threads that it starts.
struct PolicyOverride {
  using Change = std::function<void(Policy&, const ::c10d::Backend& group)>;
  std::vector<Change> changes;

  // Returns `policy` of `group` with all changes.
  Policy apply(Policy policy, const ::c10d::Backend& group) const {
    for (const Change& change : changes) change(policy, group);
    return policy;
  }
};

// Returns `policy` with the changes of the override in force on this thread, as it applies in `group`.
Policy effective_policy(const Policy& policy, const ::c10d::Backend& group);

void bind_options(pybind11::module_& module);

}  // namespace zcomm::c10d_binding
