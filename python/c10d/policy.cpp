#include "policy.hpp"

#include "zcomm/error.hpp"

namespace zcomm {

std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::all_reduce:
      return "all_reduce";
  }
  throw ArgumentError("collective: unknown value");
}

std::string_view to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::compressed:
      return "compressed";
    case Verdict::single_rank:
      return "single_rank";
    case Verdict::format_exact:
      return "format_exact";
    case Verdict::not_a_float:
      return "not_a_float";
    case Verdict::dtype:
      return "dtype";
    case Verdict::operation:
      return "operation";
    case Verdict::layout:
      return "layout";
    case Verdict::form:
      return "form";
    case Verdict::out_of_place:
      return "out_of_place";
    case Verdict::min_bytes:
      return "min_bytes";
    case Verdict::no_gain:
      return "no_gain";
  }
  throw ArgumentError("verdict: unknown value");
}

std::string_view to_string(Choice choice) { return choice == Choice::always ? "always" : "auto"; }

Choice parse_choice(std::string_view name) {
  for (const Choice choice : {Choice::always, Choice::automatic}) {
    if (name == to_string(choice)) return choice;
  }
  throw ArgumentError("expected 'always' or 'auto', got '" + std::string(name) + "'");
}

namespace {

bool is_exact(const Policy& policy, const Call& call) {
  // A bf16 wire holds no less than 16-bit values do: for them it is the exact path.
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
  }
  throw ArgumentError("collective: unknown value");
}

Verdict decide(const Policy& policy, const Call& call, int size) {
  if (size == 1) return Verdict::single_rank;
  if (is_exact(policy, call)) return Verdict::format_exact;
  if (!call.floating_point) return Verdict::not_a_float;
  if (!call.dtype) return Verdict::dtype;
  if (!call.linear) return Verdict::operation;
  if (!call.contiguous) return Verdict::layout;
  if (call.form == Form::list && !policy.lists) return Verdict::form;
  if (call.form == Form::coalesced && !policy.coalesced) return Verdict::form;
  if (call.form == Form::single && call.collective == Collective::all_gather && !call.in_place &&
      !policy.out_of_place) {
    return Verdict::out_of_place;
  }
  if (call.num_bytes < policy.min_bytes || call.num_bytes == 0) return Verdict::min_bytes;
  return Verdict::compressed;
}

Route route_of(const Policy& policy, const Call& call, Verdict verdict) {
  if (verdict == Verdict::compressed) return Route::compressed;
  const bool is_wanted = (verdict == Verdict::format_exact && policy.reduce_scatter.direct) ||
                         (verdict == Verdict::min_bytes && policy.small_reduce_scatter.direct);
  const bool is_possible = call.collective == Collective::reduce_scatter && call.form != Form::coalesced &&
                           call.on_host && call.dtype && call.linear && call.contiguous && call.num_bytes > 0;
  return is_wanted && is_possible ? Route::direct : Route::inner;
}

void enforce_strict(const Policy& policy, const Call& call, Verdict verdict) {
  if (!policy.strict || call.num_bytes < policy.min_bytes) return;
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
      remedy =
          call.form == Form::list ? "lists=True compresses list forms" : "coalesced=True compresses coalesced forms";
      break;
    case Verdict::out_of_place:
      remedy = "out_of_place=True compresses all-gathers whose input is not its own slot of the output";
      break;
    default:
      return;
  }
  throw Error("strict=True forbids that a " + std::string(to_string(call.collective)) + " of " +
              std::to_string(call.num_bytes) + " bytes goes out exact (reason: " + std::string(to_string(verdict)) +
              "): " + remedy + "; or call it under zcomm.exact()");
}

}  // namespace zcomm
