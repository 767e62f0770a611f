// Decides which calls are compressed. Nothing else is.
// Torch-free: it builds alone for its test.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce };
std::string_view to_string(Collective collective);

// How the caller hands over its tensors.
enum class Form : std::uint8_t {
  single,     // one input tensor, one output tensor: what FSDP2 calls
  list,       // a list of tensors, one per rank
  coalesced,  // several collectives in one call: DTensor, full state dicts, functional collectives
};

// What a collective asks for. Plain values, so that an all-gather of 1 TB costs no more to decide than one of 1 byte.
struct Call {
  Collective collective = Collective::all_gather;
  Form form = Form::single;
  std::optional<DType> dtype;  // empty: not one of the value types of a codec
  bool floating_point = true;  // of the tensors, whatever their type
  std::int64_t num_bytes = 0;  // of the gathered, scattered or reduced tensor, the same on all ranks
  bool in_place = false;       // all_gather: the input is its own slot of the output
  bool again = false;          // all_gather: the same values are gathered once more, from secondary shards
  bool linear = true;          // reductions: SUM, AVG or PREMUL_SUM
  bool contiguous = true;      // all tensors, and none of them sparse
  bool on_host = true;
  int device = -1;  // the GPU, otherwise
};

// Why a call goes out exact, or that it does not.
enum class Verdict : std::uint8_t {
  compressed,
  single_rank,   // nothing moves
  format_exact,  // the options, or exact(), say so
  not_a_float,   // integers, bool, ...
  dtype,         // float64, fp8, complex: no codec takes it
  operation,     // MAX, MIN, PRODUCT, bitwise
  layout,        // not contiguous, or sparse
  form,          // list or coalesced, not opted in
  out_of_place,  // an all-gather whose input is not its own slot, not opted in
  min_bytes,     // smaller than Policy::min_bytes
  no_gain,       // it could be compressed, but Choice::automatic found that this takes no less time
};
inline constexpr int kNumVerdicts = 11;
std::string_view to_string(Verdict verdict);

// Which of the calls that decide() would have compressed are.
enum class Choice : std::uint8_t {
  always,     // all
  automatic,  // those that gain by it: see AutoPolicy
};
// "always", "auto".
std::string_view to_string(Choice choice);
// The inverse. Throws ArgumentError on any other name.
Choice parse_choice(std::string_view name);

struct Policy {
  Choice choice = Choice::always;
  BlockFormat all_gather{ElementKind::int8, 256};
  HopFormats reduce_scatter{{ElementKind::int8, 128}, {ElementKind::int4, 128}};
  HopFormats all_reduce;            // exact
  HopFormats small_reduce_scatter;  // of those below min_bytes: exact, or direct
  std::int64_t min_bytes = 64 * 1024;
  bool out_of_place = false;  // compress single-tensor all-gathers that are not in place, too
  bool lists = false;         // compress list forms, too
  bool coalesced = false;     // compress coalesced forms, too
  // Raise where a floating-point collective of at least min_bytes, for which a format other than exact is set, would go
  // out exact.
  bool strict = false;

  // Of an all-gather twice the same.
  HopFormats formats_of(Collective collective) const;

  friend bool operator==(const Policy&, const Policy&) = default;
};

// The first reason, in the order of Verdict, that keeps `call` exact in a group of `size` ranks. Never no_gain.
Verdict decide(const Policy& policy, const Call& call, int size);

// Who carries out a call.
enum class Route : std::uint8_t {
  inner,   // torch's own group, exactly
  direct,  // zcomm, exactly: a reduce-scatter in one hop
  compressed,
};
Route route_of(const Policy& policy, const Call& call, Verdict verdict);

// Throws Error if `policy.strict` forbids `verdict` for `call`, naming the call, the reason and the option that opts
// in.
void enforce_strict(const Policy& policy, const Call& call, Verdict verdict);

}  // namespace zcomm
