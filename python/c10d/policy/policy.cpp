#include "policy.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "zcomm/error.hpp"

namespace zcomm {

std::string_view to_string(Collective collective) {
  constexpr auto kNames = std::to_array<std::string_view>(
      {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gather", "scatter", "broadcast"});
  static_assert(kNames.size() == kCollectives.size());
  return kNames.at(static_cast<std::size_t>(collective));
}

std::string_view to_string(Verdict verdict) {
  constexpr auto kNames =
      std::to_array<std::string_view>({"compressed", "single_rank", "not_a_float", "dtype", "operation", "format_exact",
                                       "layout", "form", "out_of_place", "in_place", "min_bytes", "no_gain"});
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
constexpr NamedForm kForms[] = {{"in_place", &Forms::in_place},
                                {"out_of_place", &Forms::out_of_place},
                                {"list", &Forms::list},
                                {"coalesced", &Forms::coalesced}};
constexpr std::string_view kTraced = "traced:";

}  // namespace

Forms Forms::parse(std::span<const std::string> names) {
  Forms forms;
  for (const std::string& name : names) {
    const auto* known = std::ranges::find(kForms, name, &NamedForm::first);
    if (known != std::end(kForms)) {
      forms.*known->second = true;
    } else {
      // Quotes and backslashes would have to be escaped wherever options are shown.
      check_argument(name.starts_with(kTraced) && name.size() > kTraced.size() &&
                         name.find_first_of("'\\\n, ") == std::string::npos,
                     [&] {
                       std::string known;
                       for (const auto& [form, member] : kForms) known += std::string(form) + ", ";
                       return "expected " + known + "or traced:DIM, DIM a mesh dimension's name or world, got '" +
                              name + "'";
                     });
      forms.traced.push_back(name.substr(kTraced.size()));
    }
  }
  std::ranges::sort(forms.traced);
  const auto repeated = std::ranges::unique(forms.traced);
  forms.traced.erase(repeated.begin(), repeated.end());
  return forms;
}

std::vector<std::string> Forms::names() const {
  std::vector<std::string> all;
  for (const auto& [name, member] : kForms) {
    if (this->*member) all.emplace_back(name);
  }
  for (const std::string& dimension : traced) all.push_back(std::string(kTraced) + dimension);
  return all;
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
      return all_to_all;
    case Collective::gather:
      return gather;
    case Collective::scatter:
      return scatter;
    case Collective::broadcast:
      return {broadcast, broadcast};
  }
  throw ArgumentError("collective: unknown value");
}

bool names_group(std::span<const std::string> dimensions, std::string_view description) {
  constexpr std::string_view kOfMesh = "mesh_";
  const std::string_view dimension = description == "default_pg"        ? "world"
                                     : description.starts_with(kOfMesh) ? description.substr(kOfMesh.size())
                                                                        : std::string_view();
  return !dimension.empty() && std::ranges::find(dimensions, dimension) != dimensions.end();
}

Verdict decide(const Policy& policy, const Call& call, int size) {
  if (size == 1) return Verdict::single_rank;
  // What no format compresses comes first: the reason names what a user could change.
  if (!call.floating_point) return Verdict::not_a_float;
  if (!call.dtype) return Verdict::dtype;
  if (!call.linear) return Verdict::operation;
  if (is_exact(policy, call)) return Verdict::format_exact;
  if (!call.contiguous) return Verdict::layout;
  // Ranks know only their own parts of an all-to-all, so each pair decides by the size of its message.
  if (call.collective == Collective::all_to_all) return Verdict::compressed;
  if (call.form == Form::list && !policy.forms.list && !is_exchange(call.collective)) return Verdict::form;
  if (call.form == Form::coalesced && !policy.forms.coalesced && !call.traced) return Verdict::form;
  if (call.form == Form::single && call.collective == Collective::all_gather) {
    if (!call.in_place && !policy.forms.out_of_place) return Verdict::out_of_place;
    // Excludes in-place gathers: a rank also decodes its own slot, and an optimizer that steps rounded weights loses
    // updates.
    if (call.in_place && !policy.forms.in_place && !call.traced) return Verdict::in_place;
  }
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
      remedy = "only contiguous dense tensors are compressed";
      break;
    case Verdict::form:
      remedy = call.form == Form::list ? "forms='list' compresses list forms"
                                       : "forms='coalesced' compresses coalesced forms, 'traced:DIM' those that "
                                         "compiled graphs call in the group of a mesh's dimension";
      break;
    case Verdict::out_of_place:
      remedy = "forms='out_of_place' compresses all-gathers whose input is not its own slot of the output";
      break;
    case Verdict::in_place:
      remedy =
          "forms='in_place' compresses all-gathers in place, and rounds the sender's own values, too; 'traced:DIM' "
          "those in the group of a mesh's dimension";
      break;
    default:
      return;
  }
  throw Error("strict=True forbids that a " + std::string(to_string(call.collective)) + " of " +
              std::to_string(call.num_bytes) + " bytes goes out exact (reason: " + std::string(to_string(verdict)) +
              "): " + remedy + "; or call it under zcomm.exact()");
}

}  // namespace zcomm
