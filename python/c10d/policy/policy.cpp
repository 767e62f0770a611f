#include "policy.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "zcomm/error.hpp"

namespace zcomm {

const CollectiveTraits& traits_of(Collective collective) {
  static constexpr auto kTraits = std::to_array<CollectiveTraits>({
      {.name = "all_gather", .title = "zcomm:all_gather", .has_one_format = true},
      {.name = "reduce_scatter", .title = "zcomm:reduce_scatter", .is_sum = true},
      {.name = "all_reduce", .title = "zcomm:all_reduce", .is_sum = true, .is_in_place = true},
      {.name = "all_to_all", .title = "zcomm:all_to_all", .is_exchange = true, .has_exchange_plan = true},
      {.name = "gather", .title = "zcomm:gather", .is_exchange = true, .has_exchange_plan = true},
      {.name = "scatter", .title = "zcomm:scatter", .is_exchange = true, .has_exchange_plan = true},
      {.name = "broadcast",
       .title = "zcomm:broadcast",
       .is_exchange = true,
       .has_one_format = true,
       .is_in_place = true},
  });
  static_assert(kTraits.size() == kCollectives.size());
  return kTraits.at(static_cast<std::size_t>(collective));
}

std::string_view to_string(Verdict verdict) {
  constexpr auto kNames = std::to_array<std::string_view>(
      {"compressed", "single_rank", "not_a_float", "dtype", "operation", "format_exact", "layout", "group", "form",
       "unmarked", "out_of_place", "in_place", "min_bytes", "no_gain"});
  static_assert(kNames.size() == kNumVerdicts);
  return kNames.at(static_cast<std::size_t>(verdict));
}

std::string_view to_string(Choice choice) { return choice == Choice::always ? "always" : "auto"; }
Choice parse_choice(std::string_view name) {
  for (const Choice choice : {Choice::always, Choice::automatic}) {
    if (name == to_string(choice)) return choice;
  }
  throw ArgumentError("expected 'always' or 'auto', got '" + std::string(name) + "'");
}

namespace {

using NamedForm = std::pair<std::string_view, bool Forms::*>;
constexpr NamedForm kForms[] = {
    {"single", &Forms::single}, {"in_place", &Forms::in_place},   {"out_of_place", &Forms::out_of_place},
    {"list", &Forms::list},     {"coalesced", &Forms::coalesced}, {"traced", &Forms::traced}};

std::string known_forms() {
  std::string known;
  for (const auto& [form, member] : kForms) known += (known.empty() ? "" : ", ") + std::string(form);
  return known;
}

}  // namespace

Forms Forms::parse(std::span<const std::string> names) {
  Forms forms;
  for (const std::string& name : names) {
    const auto* known = std::ranges::find(kForms, name, &NamedForm::first);
    check_argument(known != std::end(kForms), [&] { return "expected " + known_forms() + ", got '" + name + "'"; });
    forms.*known->second = true;
  }
  return forms;
}

std::vector<std::string> Forms::names() const {
  std::vector<std::string> all;
  for (const auto& [name, member] : kForms) {
    if (this->*member) all.emplace_back(name);
  }
  return all;
}

Forms& Forms::operator|=(const Forms& others) {
  for (const auto& [name, member] : kForms) this->*member = this->*member || others.*member;
  return *this;
}

GroupRule GroupRule::parse(std::string pattern, std::span<const std::string> names) {
  // Quotes and backslashes would have to be escaped wherever options are shown.
  check_argument(!pattern.empty() && pattern.find_first_of("'\\\n=;") == std::string::npos,
                 [&] { return "expected a pattern without quotes, backslashes, = and ;, got '" + pattern + "'"; });
  GroupRule rule{std::move(pattern), names.size() == 1 && names[0] == "exact", {}};
  if (!rule.exact) {
    check_argument(!names.empty(),
                   [&] { return "expected exact or " + known_forms() + " for '" + rule.pattern + "', got nothing"; });
    rule.forms = Forms::parse(names);
  }
  return rule;
}

bool GroupRule::matches(const std::string& description) const {
  constexpr std::string_view kOfMesh = "mesh_";
  const auto is_named = [this](const char* name) { return fnmatch(pattern.c_str(), name, 0) == 0; };
  return is_named(description.c_str()) || (description == "default_pg" && is_named("world")) ||
         (description.starts_with(kOfMesh) && is_named(description.c_str() + kOfMesh.size()));
}

namespace {

bool is_exact(const Policy& policy, const Call& call) {
  // Treats bf16 as exact for 16-bit values, which would take as many bytes.
  const auto keeps_all = [&](const BlockFormat& format) {
    return format.kind == ElementKind::exact ||
           (format.kind == ElementKind::bf16 && call.dtype && *call.dtype != DType::float32);
  };
  const HopFormats formats = policy.formats_of(call.collective);
  return keeps_all(formats.intra_node) && keeps_all(formats.inter_node);
}

}  // namespace

HopFormats Policy::formats_of(Collective collective) const {
  switch (collective) {
    case Collective::all_gather:
      return {all_gather, all_gather};
    case Collective::reduce_scatter:
      return reduce_scatter;
    case Collective::all_reduce:
      return all_reduce;
    case Collective::all_to_all:
      return all_to_all.value_or(exchanges);
    default:
      return exchanges;
  }
}

void Policy::narrow_to(const std::string& description) {
  for (const GroupRule& rule : groups) {
    if (!rule.matches(description)) continue;
    exact_group = exact_group || rule.exact;
    forms |= rule.forms;
  }
}

namespace {

// Decides by who calls and in which form.
Verdict of_form(const Policy& policy, const Call& call) {
  const Forms& forms = policy.forms;
  const bool is_gather = call.collective == Collective::all_gather;
  const bool is_traced = forms.traced && !policy.drops_traced && call.may_be_traced;
  // A rank also decodes its own slot, and an optimizer that steps rounded weights loses updates.
  const bool rounds_own = is_gather && call.in_place && !forms.in_place && !is_traced && !policy.copies;
  if (policy.known) return rounds_own ? Verdict::in_place : Verdict::compressed;
  if (call.form == Form::list && !forms.list && !is_exchange(call.collective)) return Verdict::form;
  if (call.form == Form::coalesced && !forms.coalesced && !is_traced) return Verdict::form;
  if (call.form == Form::single && call.collective == Collective::reduce_scatter && !forms.single)
    return Verdict::unmarked;
  if (call.form == Form::single && is_gather && !call.in_place && !forms.out_of_place) return Verdict::out_of_place;
  return rounds_own ? Verdict::in_place : Verdict::compressed;
}

}  // namespace

Verdict decide(const Policy& policy, const Call& call, int size) {
  if (size == 1) return Verdict::single_rank;
  // What no format compresses comes first: the reason names what a user could change.
  if (!call.floating_point) return Verdict::not_a_float;
  if (!call.dtype) return Verdict::dtype;
  if (!call.linear) return Verdict::operation;
  if (is_exact(policy, call)) return Verdict::format_exact;
  if (!call.contiguous) return Verdict::layout;
  if (policy.exact_group) return Verdict::group;
  // Ranks know only their own parts of an all-to-all, so each pair decides by the size of its message.
  if (call.collective == Collective::all_to_all) return Verdict::compressed;
  const Verdict verdict = of_form(policy, call);
  if (verdict != Verdict::compressed) return verdict;
  if (call.num_bytes < policy.min_bytes || call.num_bytes == 0) return Verdict::min_bytes;
  return Verdict::compressed;
}

void enforce_strict(const Policy& policy, const Call& call, Verdict verdict) {
  if (!policy.strict || call.num_bytes < policy.min_bytes || is_exact(policy, call)) return;
  std::string remedy;
  switch (verdict) {
    case Verdict::dtype:
      remedy = "the codecs take float32, bfloat16 and float16";
      break;
    case Verdict::operation:
      remedy = "the codecs take SUM, AVG and PREMUL_SUM";
      break;
    case Verdict::layout:
      remedy = "only contiguous dense tensors, and lists of equal lengths, are compressed";
      break;
    case Verdict::form:
      remedy = call.form == Form::list
                   ? "forms='list' compresses list forms"
                   : "forms='coalesced' compresses coalesced forms, 'traced' those of compiled graphs";
      break;
    case Verdict::unmarked:
      remedy = "forms='single' compresses reduce-scatters of one tensor, if they carry gradients";
      break;
    case Verdict::out_of_place:
      remedy = "forms='out_of_place' compresses all-gathers whose input is not its own slot of the output";
      break;
    case Verdict::in_place:
      remedy =
          "forms='in_place' compresses all-gathers in place, and rounds the sender's own values, too; 'traced' those "
          "of compiled graphs";
      break;
    default:
      return;
  }
  throw Error("strict=True, but a call of " + std::string(to_string(call.collective)) + " with " +
              std::to_string(call.num_bytes) +
              " bytes would be sent uncompressed (reason: " + std::string(to_string(verdict)) + "): " + remedy +
              "; groups={'PATTERN': ...} opts in or out for the groups of a name; or call it under zcomm.exact()");
}

}  // namespace zcomm
