// Policy: decides which calls are compressed. Torch-free: it builds alone for its test.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zcomm/block_format.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce, all_to_all, gather, scatter, broadcast };
inline constexpr std::array kCollectives{Collective::all_gather, Collective::reduce_scatter, Collective::all_reduce,
                                         Collective::all_to_all, Collective::gather,         Collective::scatter,
                                         Collective::broadcast};

// What the planner and observers know of a collective.
struct CollectiveTraits {
  std::string_view name;
  const char* title;  // of its events in profilers
  // The option `exchanges` has its formats. Such calls are compressed in any form, whatever Choice::automatic finds:
  // ranks may send different lengths, which no rehearsal can repeat.
  bool is_exchange = false;
  bool has_exchange_plan = false;  // see exchange.hpp
  bool is_sum = false;             // values are decoded to float32 and added
  bool has_one_format = false;     // on all links: a rank encodes its own values once
  bool is_in_place = false;        // the output is the input, so a rank reads as many elements as it writes
};
const CollectiveTraits& traits_of(Collective collective);
inline std::string_view to_string(Collective collective) { return traits_of(collective).name; }
inline bool is_exchange(Collective collective) { return traits_of(collective).is_exchange; }

// Form of a call's tensors.
enum class Form : std::uint8_t {
  single,     // one input tensor, one output tensor: as FSDP2 calls
  list,       // a list of tensors, one per rank
  coalesced,  // several collectives in one call, or one: DTensor, full state dicts, functional collectives
};

// Properties of a call, as plain values: deciding costs the same for tensors of any size.
struct Call {
  Collective collective = Collective::all_gather;
  Form form = Form::single;
  std::optional<DType> dtype;  // empty: no codec takes the type
  bool floating_point = true;  // of the tensors, whatever their type
  std::int64_t num_bytes = 0;  // of the gathered, scattered or reduced tensor, the same on all ranks; of an
                               // all-to-all's input
  bool in_place = false;       // all_gather: the input is its own slot of the output
  bool may_be_traced = false;  // as a compiled graph calls it
  bool again = false;          // all_gather: the values are gathered again, from secondary shards
  bool linear = true;          // reductions: SUM, AVG or PREMUL_SUM
  bool contiguous = true;      // all tensors, none of them sparse, and lists of equal lengths
  bool on_host = true;
  int device = -1;  // the GPU, otherwise
};

// Result of decide(): compressed, or the reason why a call stays exact.
enum class Verdict : std::uint8_t {
  compressed,
  single_rank,   // nothing moves
  not_a_float,   // integers, bool, ...
  dtype,         // float64, fp8, complex: no codec takes it
  operation,     // MAX, MIN, PRODUCT, bitwise
  format_exact,  // the options, or exact(), say so
  layout,        // not contiguous, sparse, or a list of different lengths
  group,         // Policy::groups keeps the group exact
  form,          // list or coalesced, not opted in
  unmarked,      // a reduce-scatter of one tensor that is not known to carry gradients
  out_of_place,  // an all-gather whose input is not its own slot, not opted in
  in_place,      // an all-gather that would round the caller's own slot, not opted in
  min_bytes,     // smaller than Policy::min_bytes
  no_gain,       // it could be compressed, but Choice::automatic found that this takes no less time
};
inline constexpr int kNumVerdicts = 14;
std::string_view to_string(Verdict verdict);

// Rule about the calls that decide() would compress.
enum class Choice : std::uint8_t {
  always,     // compresses all
  automatic,  // compresses those that gain by it: see AutoPolicy
};
// Returns "always" or "auto".
std::string_view to_string(Choice choice);
// Parses a name that to_string returns. Throws ArgumentError on any other.
Choice parse_choice(std::string_view name);

// Forms of calls to compress although nobody is known to send weights or gradients with them.
struct Forms {
  bool single = false;        // reduce-scatters of one tensor
  bool in_place = false;      // all-gathers of any form in place, which rounds the sender's own values, too
  bool out_of_place = false;  // single-tensor all-gathers that are not in place
  bool list = false;
  bool coalesced = false;
  bool traced = false;  // what compiled graphs call

  // Names as names() has them, in any order. Throws ArgumentError that lists the known ones.
  static Forms parse(std::span<const std::string> names);
  // "single", "in_place", "out_of_place", "list", "coalesced", "traced".
  std::vector<std::string> names() const;
  Forms& operator|=(const Forms& others);
  friend bool operator==(const Forms&, const Forms&) = default;
};

// What is compressed in the groups that a pattern of fnmatch names.
struct GroupRule {
  std::string pattern;
  bool exact = false;  // nothing, whatever else opts in
  Forms forms;         // beside Policy::forms

  // `names` has forms, or "exact" alone. Throws ArgumentError.
  static GroupRule parse(std::string pattern, std::span<const std::string> names);
  // Tells whether the pattern matches what torch calls a group: its description, of a mesh's dimension the dimension's
  // name ("mesh_dp" is "dp", too), and "world" for the default group.
  bool matches(const std::string& description) const;
  friend bool operator==(const GroupRule&, const GroupRule&) = default;
};

struct Policy {
  Choice choice = Choice::always;
  BlockFormat all_gather{ElementKind::int8, 256};
  HopFormats reduce_scatter{{ElementKind::int8, 128}, {ElementKind::int4, 128}};
  HopFormats all_reduce;  // exact, as the next one: activations are not gradients
  HopFormats exchanges;   // is_exchange(), and messages between two ranks, which are no collective: see SendRecv
  // All-to-alls that carry gradients. No option: known() in Python sets it; empty: as other exchanges.
  std::optional<HopFormats> all_to_all;
  std::int64_t min_bytes = 64 * 1024;
  Forms forms;
  std::vector<GroupRule> groups;  // sorted by pattern: all that match count
  // Raises if a floating-point collective of at least min_bytes stays exact although its format is not.
  bool strict = false;
  // Why all calls stay exact, where a plan has decided it already. No option: forced_exact() in Python sets it.
  std::optional<Verdict> exact_because;
  // The caller knows that its calls carry weights or gradients. No option: known() in Python sets it.
  bool known = false;
  // That no optimizer steps what the caller gathers in place, neither.
  bool copies = false;
  // The calls are DTensor's redistributions, which look like those of compiled graphs. No option, either.
  bool drops_traced = false;
  // GroupRule::exact of the group. No option: narrow_to() sets it.
  bool exact_group = false;

  // Applies the rules about the group that torch describes so.
  void narrow_to(const std::string& description);
  // Returns the formats of a collective; for an all-gather twice the same.
  HopFormats formats_of(Collective collective) const;

  friend bool operator==(const Policy&, const Policy&) = default;
};

// Returns the first reason, in the order of Verdict, that keeps `call` exact in a group of `size` ranks. Never no_gain.
Verdict decide(const Policy& policy, const Call& call, int size);

// Throws Error if `policy.strict` forbids `verdict` for `call`; the text names the call, the reason and the option that
// opts in.
void enforce_strict(const Policy& policy, const Call& call, Verdict verdict);

}  // namespace zcomm
