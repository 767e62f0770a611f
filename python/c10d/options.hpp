// Options: the policy and settings of its execution.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <type_traits>

#include "policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct OptionValues {
  Policy policy;
  std::optional<int> node_size;          // ranks per node, in rank order; empty: found from the launcher or the host
  std::optional<int> chunk_bytes;        // empty: kDefaultChunkBytes, or on a GPU default_gpu_chunk_bytes()
  std::int64_t sample_errors_every = 0;  // calls of a site from one sample to the next; 0: none
  std::string decisions;                 // a file that Choice::automatic decides by; empty: it measures

  friend bool operator==(const OptionValues&, const OptionValues&) = default;
};

// Row of the table of options.
struct OptionField {
  const char* name;
  bool compared = true;    // between ranks, which must have the same
  std::int64_t least = 0;  // of an integer
  const char* holds = "";  // of a text: what it is
};

// Table of options: calls visit(OptionField, pointer to the member) for each. Members of Policy can be overridden.
// Arguments, properties, repr, environment variables, overrides and the handshake follow from it.
template <class Visit>
void for_each_field(Visit&& visit) {
  visit(OptionField{"policy"}, &Policy::choice);
  visit(OptionField{"all_gather"}, &Policy::all_gather);
  visit(OptionField{"reduce_scatter"}, &Policy::reduce_scatter);
  visit(OptionField{"all_reduce"}, &Policy::all_reduce);
  visit(OptionField{"all_to_all"}, &Policy::all_to_all);
  visit(OptionField{"gather"}, &Policy::gather);
  visit(OptionField{"scatter"}, &Policy::scatter);
  visit(OptionField{"broadcast"}, &Policy::broadcast);
  visit(OptionField{"send_recv"}, &Policy::send_recv);
  visit(OptionField{"min_bytes"}, &Policy::min_bytes);
  visit(OptionField{"forms"}, &Policy::forms);
  visit(OptionField{"strict"}, &Policy::strict);
  visit(OptionField{.name = "node_size", .least = 1}, &OptionValues::node_size);
  visit(OptionField{.name = "chunk_bytes", .least = 1}, &OptionValues::chunk_bytes);
  visit(OptionField{.name = "sample_errors_every", .compared = false}, &OptionValues::sample_errors_every);
  visit(OptionField{.name = "decisions", .holds = "the name of a file"}, &OptionValues::decisions);
}

template <class Values, class T, class Owner>
auto& member_of(Values&& values, T Owner::* member) {
  if constexpr (std::is_same_v<Owner, Policy>) {
    return values.policy.*member;
  } else {
    return values.*member;
  }
}
template <class T, class Owner>
constexpr bool is_overridable(T Owner::*) {
  return std::is_same_v<Owner, Policy>;
}

// Options of one group.
struct ZcommOptions : ::c10d::Backend::Options, OptionValues {
  ZcommOptions() : ::c10d::Backend::Options("zcomm") {}
};

// Changes to the policy for the calls of one thread, and of the autograd threads that it starts.
struct PolicyOverride {
  OptionValues values;
  std::bitset<32> named;                 // which fields count, by their place in the table
  bool drops_traced = false;             // clears Forms::traced, and leaves the other forms as they are
  std::optional<Verdict> exact_because;  // see Policy
  // Formats of the all-reduces of this group alone, where no field names others.
  std::optional<std::pair<const ::c10d::Backend*, HopFormats>> all_reduce_of;

  Policy apply(Policy policy, const ::c10d::Backend* group) const;
};

// Returns `policy` of `group`, if any, with the changes of the override in force on this thread.
Policy effective_policy(const Policy& policy, const ::c10d::Backend* group = nullptr);

// Name of the override in force in torch's thread-local storage, which holds it as a Python object. torch carries that
// storage over to autograd threads.
inline constexpr const char* kOverrideKey = "zcomm.override";

}  // namespace zcomm::c10d_binding
