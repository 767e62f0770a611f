#include "profiling.hpp"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "flight_recorder.hpp"
#include "job.hpp"

namespace zcomm::c10d_binding {
namespace {

// Returns torch's own name of a collective in traces; its analyzer of flight recorders has another one for some.
std::string_view profilers_name(std::string_view analyzers_name) {
  if (analyzers_name == "_all_gather_base") return "_allgather_base";
  if (analyzers_name == "all_reduce") return "allreduce";
  return analyzers_name;
}

// Returns a group's ranks as a first one and a stride, as in torch's events; -1 if there is no stride.
std::pair<int, int> start_and_stride(const std::vector<std::uint64_t>& ranks) {
  if (ranks.empty()) return {0, 1};
  const auto at = [&](std::size_t i) { return static_cast<int>(ranks[i]); };
  const int stride = ranks.size() > 1 ? at(1) - at(0) : 1;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (at(i) - at(i - 1) != stride) return {at(0), -1};
  }
  return {at(0), stride};
}

// Passes on the number of the call and whether it is asynchronous, which torch takes from 2.13 on.
template <class Info = torch::ParamCommsDebugInfo, class... Args>
std::shared_ptr<Info> make_info(const Job& job, Args&&... args) {
  std::shared_ptr<Info> info;
  if constexpr (std::is_constructible_v<Info, Args..., bool>) {
    info = std::make_shared<Info>(std::forward<Args>(args)..., job.settings.async);
  } else {
    info = std::make_shared<Info>(std::forward<Args>(args)...);
  }
  if constexpr (requires { info->setSequenceInfo(0, false); }) {
    info->setSequenceInfo(static_cast<std::int64_t>(job.sequence_number), false);
  }
  return info;
}

std::unordered_map<std::string, c10::IValue> own_fields(const Job& job) {
  const std::string call = std::string(job.title()).substr(std::string_view("zcomm:").size());
  std::unordered_map<std::string, c10::IValue> fields{{"zcomm plan", call + " " + job.operation->description()}};
  if (const std::optional<LinkBytes> wire = job.operation->bytes(job.arguments())) {
    fields["Wire bytes intra-node"] = static_cast<std::int64_t>(wire->intra_node);
    fields["Wire bytes inter-node"] = static_cast<std::int64_t>(wire->inter_node);
  }
  return fields;
}

// Event of one call, until it is destroyed. Has "zcomm plan" in addition to the usual arguments and, if known before
// the call, this rank's "Wire bytes intra-node" and "Wire bytes inter-node".
struct CallEvent {
  std::vector<c10::IValue> inputs;
  std::optional<c10::DebugInfoGuard> debug_info;
  at::RecordFunction function{at::RecordScope::FUNCTION};  // last: it ends before the fields above
};

std::shared_ptr<void> begin_range(const char* name) {
  auto range = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (range->isActive()) range->before(name);
  return range;
}

}  // namespace

std::shared_ptr<void> Profilers::begin(Job& job) {
  if (!at::hasCallbacks()) return nullptr;
  auto event = std::make_shared<CallEvent>();
  if (!event->function.isActive()) return nullptr;
  const RecordedCall call = recorded_call(job);
  const std::string title(profilers_name(call.name));
  const std::tuple<std::string, std::string> name(group_.getGroupUid(), group_.getGroupDesc());
  const auto [start, stride] = start_and_stride(ranks_);
  const std::vector<std::int64_t> no_splits;
  event->debug_info.emplace(
      c10::DebugInfoKind::PARAM_COMMS_INFO,
      make_info(job, name, group_.getRank(), std::string(title), call.in_elements, call.out_elements,
                job.outputs[0].scalar_type(), no_splits, no_splits, start, stride, group_.getSize()));
  // Follows the order of torch's own RECORD_PARAM_COMMS_DATA, which readers of execution traces rely on.
  event->inputs = {job.inputs,
                   std::make_tuple(static_cast<std::int64_t>(job.sequence_number), false),
                   name,
                   static_cast<std::int64_t>(group_.getRank()),
                   title,
                   no_splits,
                   no_splits,
                   static_cast<std::int64_t>(start),
                   static_cast<std::int64_t>(stride),
                   static_cast<std::int64_t>(group_.getSize()),
                   job.settings.async};
  const std::unordered_map<std::string, c10::IValue> fields = own_fields(job);
  event->function.before(at::kParamCommsCallName, &event->inputs, &fields);
  if (event->function.needsOutputs()) event->function.setOutputs(std::vector<c10::IValue>{job.outputs});
  return event;
}

BeginRange profilers_ranges() { return at::hasCallbacks() ? begin_range : nullptr; }

}  // namespace zcomm::c10d_binding
