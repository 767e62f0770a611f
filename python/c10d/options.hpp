// What a user sets: the policy and how it is carried out.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct OptionValues {
  Policy policy;
  std::optional<int> node_size;      // ranks per node, in rank order; empty: found from the launcher or the host
  std::optional<int> chunk_bytes;    // empty: kDefaultChunkBytes, or on a GPU default_gpu_chunk_bytes()
  std::uint64_t seed = 0;            // of stochastic rounding
  bool high_priority_stream = true;  // of asynchronous calls on a GPU
  bool blocking_wait = false;        // wait() on a GPU blocks the host
  bool end_on_failure = true;        // of transfers on a GPU whose calls have returned: ends the process
  int max_ctas = 0;                  // for transfers on a GPU; 0: what NCCL takes
  std::int64_t telemetry_every = 0;  // calls of a site from one sample to the next; 0: none
  std::string calibration;           // a file that Choice::automatic decides by; empty: it measures

  friend bool operator==(const OptionValues&, const OptionValues&) = default;
};

// A row of the table of options.
struct OptionField {
  const char* name;
  bool compared = true;     // between ranks, which must have the same
  bool direct = false;      // formats may be direct
  bool exact_only = false;  // formats must be exact
  std::int64_t least = 0;   // of an integer
};

// The table: visit(OptionField, pointer to the member) for each option. What can be overridden is a member of Policy.
// Arguments, properties, repr, environment variables, overrides and the handshake follow from it.
template <class Visit>
void for_each_field(Visit&& visit) {
  visit(OptionField{"policy"}, &Policy::choice);
  visit(OptionField{"all_gather"}, &Policy::all_gather);
  visit(OptionField{.name = "reduce_scatter", .direct = true}, &Policy::reduce_scatter);
  visit(OptionField{.name = "small_reduce_scatter", .direct = true, .exact_only = true}, &Policy::small_reduce_scatter);
  visit(OptionField{"all_reduce"}, &Policy::all_reduce);
  visit(OptionField{"min_bytes"}, &Policy::min_bytes);
  visit(OptionField{"out_of_place"}, &Policy::out_of_place);
  visit(OptionField{"lists"}, &Policy::lists);
  visit(OptionField{"coalesced"}, &Policy::coalesced);
  visit(OptionField{"strict"}, &Policy::strict);
  visit(OptionField{.name = "node_size", .least = 1}, &OptionValues::node_size);
  visit(OptionField{.name = "chunk_bytes", .least = 1}, &OptionValues::chunk_bytes);
  visit(OptionField{"seed"}, &OptionValues::seed);
  visit(OptionField{.name = "high_priority_stream", .compared = false}, &OptionValues::high_priority_stream);
  visit(OptionField{.name = "blocking_wait", .compared = false}, &OptionValues::blocking_wait);
  visit(OptionField{.name = "end_on_failure", .compared = false}, &OptionValues::end_on_failure);
  visit(OptionField{"max_ctas"}, &OptionValues::max_ctas);
  visit(OptionField{.name = "telemetry_every", .compared = false}, &OptionValues::telemetry_every);
  visit(OptionField{"calibration"}, &OptionValues::calibration);
}

template <class T>
T& member_of(OptionValues& values, T Policy::* member) {
  return values.policy.*member;
}
template <class T>
T& member_of(OptionValues& values, T OptionValues::* member) {
  return values.*member;
}
template <class T, class Owner>
const T& member_of(const OptionValues& values, T Owner::* member) {
  return member_of(const_cast<OptionValues&>(values), member);
}
template <class T>
constexpr bool is_overridable(T Policy::*) {
  return true;
}
template <class T>
constexpr bool is_overridable(T OptionValues::*) {
  return false;
}

// "all_gather='int8:256', min_bytes=65536, ...": all fields, as Python would write them.
std::string to_string(const OptionValues& values);
// The same of the fields that ranks compare. A change of words is a difference between versions.
std::string handshake_text(const OptionValues& values);

// The options of one group.
struct ZcommOptions : ::c10d::Backend::Options, OptionValues {
  ZcommOptions() : ::c10d::Backend::Options("zcomm") {}
};

// Changes to a policy for the calls of one thread, and of the autograd threads that it starts.
struct PolicyOverride {
  OptionValues values;
  std::bitset<32> named;  // which fields count, by their place in the table

  Policy apply(Policy policy) const;
};

// `policy` as changed by the override that is in force on this thread.
Policy effective_policy(const Policy& policy);

// The override in force on this thread is kept as a Python object under this name in torch's thread-local storage,
// which torch itself carries over to autograd threads.
inline constexpr const char* kOverrideKey = "zcomm.override";

}  // namespace zcomm::c10d_binding
