#include "job.hpp"

#include <algorithm>
#include <numeric>

#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

template <class Views>
std::int64_t elements_of(const Views& slots) {
  return std::accumulate(slots.begin(), slots.end(), std::int64_t{0},
                         [](std::int64_t total, const auto& slot) { return total + slot.num_elements; });
}

bool is_lossy(const Segment<HopFormats>& segment) { return segment.num_elements > 0 && !segment.format.is_exact(); }

}  // namespace

CallSummary Job::summary() const {
  const bool is_list = type == ::c10d::OpType::ALLGATHER || type == ::c10d::OpType::REDUCE_SCATTER;
  switch (collective) {
    case Collective::all_gather: {
      const bool is_preparation = written.empty();
      const auto rank = static_cast<std::size_t>(operation->world().rank);
      return {is_list ? "all_gather" : "_allgather_base",
              is_preparation ? elements_of(read) : written[rank].num_elements, elements_of(written)};
    }
    case Collective::reduce_scatter:
      return {is_list ? "reduce_scatter" : "_reduce_scatter_base", elements_of(read), written.front().num_elements};
    case Collective::all_reduce:
      return {"allreduce", written.front().num_elements, written.front().num_elements};
  }
  throw ArgumentError("collective: unknown value");
}

const std::string& Job::place() const {
  static const std::string unknown;
  return site ? site->name : unknown;
}

// Passes each lossy segment that this rank encodes to the telemetry.
void Job::sample(Communicator& communicator, StreamView stream) const {
  const bool in_place = collective == Collective::all_reduce;
  if (!in_place && read.empty()) return;  // nothing is encoded
  const std::vector<Segment<HopFormats>> segments = operation->segments();
  const auto num_lossy = static_cast<std::size_t>(std::count_if(segments.begin(), segments.end(), is_lossy));
  std::int64_t begin = 0;
  std::size_t index = 0;
  for (const Segment<HopFormats>& segment : segments) {
    if (is_lossy(segment)) {
      std::vector<ConstTensorView> parts;
      for (const ConstTensorView& slot : read) parts.push_back(slot.slice(begin, segment.num_elements));
      if (in_place) parts = {written.front().slice(begin, segment.num_elements)};
      const std::string name = site ? site->name_of_part(index++, num_lossy) : "";
      telemetry->before({collective, name, outputs[0].device()}, parts, segment.format, communicator, stream);
    }
    begin += segment.num_elements;
  }
}

void Job::count(const CallStats& stats) const {
  cost->add(stats);
  if (site) site->add(stats);
  std::int64_t total = 0;
  for (const auto& [other, share] : shares) total += share;
  for (const auto& [other, share] : shares) {
    if (!other || total == 0) continue;
    CallStats part;
    part.inter_node_bytes = stats.inter_node_bytes / static_cast<std::size_t>(total) * static_cast<std::size_t>(share);
    other->cost.add(part);
  }
}

}  // namespace zcomm::c10d_binding
