#include "compressed_jobs.hpp"

#include <algorithm>

namespace zcomm::c10d_binding {
namespace {

HopFormats hop_formats(HopFormats formats) { return formats; }
HopFormats hop_formats(BlockFormat format) { return {format, format}; }

// Hands each lossy segment of `slots` to the telemetry.
template <class Format, class View>
void sample(const CompressedJob& job, Collective collective, const std::vector<View>& slots,
            std::span<const Segment<Format>> segments, Communicator& communicator, StreamView stream) {
  if (!job.telemetry->is_on()) return;
  const auto is_lossy = [](const Segment<Format>& segment) {
    return segment.num_elements > 0 && !hop_formats(segment.format).is_exact();
  };
  const auto num_lossy = static_cast<std::size_t>(std::count_if(segments.begin(), segments.end(), is_lossy));
  std::int64_t begin = 0;
  std::size_t index = 0;
  for (const Segment<Format>& segment : segments) {
    if (is_lossy(segment)) {
      std::vector<ConstTensorView> parts;
      for (const View& slot : slots) parts.push_back(slot.slice(begin, segment.num_elements));
      const std::string name = job.site ? job.site->name_of_part(index++, num_lossy) : "";
      job.telemetry->before({collective, name, job.outputs[0].device()}, parts, hop_formats(segment.format),
                            communicator, stream);
    }
    begin += segment.num_elements;
  }
}

template <class View>
std::int64_t elements_of(const std::vector<View>& slots) {
  std::int64_t num_elements = 0;
  for (const View& slot : slots) num_elements += slot.num_elements;
  return num_elements;
}

CallSummary summary_of_gather(const Job& job, int rank, const std::vector<TensorView>& slots) {
  const char* name = job.type == ::c10d::OpType::ALLGATHER ? "all_gather" : "_allgather_base";
  return {name, slots[static_cast<std::size_t>(rank)].num_elements, elements_of(slots)};
}

}  // namespace

void CompressedJob::count(const CallStats& stats) {
  cost->add(stats);
  if (site) site->add(stats);
}

void AllGatherJob::run(Communicator& communicator, StreamView stream) {
  communicator.set_seed(seed);
  // Of differences it would measure the weights.
  if (extras.reference == nullptr) {
    sample(*this, Collective::all_gather, std::vector{shard}, plan->segments(), communicator, stream);
  }
  count(communicator.all_gather(*plan, shard, slots, timeout, stream, extras));
}

CallSummary AllGatherJob::summary() const { return summary_of_gather(*this, plan->rank(), slots); }

void DifferencePrepareJob::run(Communicator& communicator, StreamView stream) {
  std::vector<ShardDifference> all;
  std::size_t num_chunks = 0;
  for (const Shard& shard : shards) {
    all.push_back({*shard.plan, shard.values, shard.held->kept});
    num_chunks += static_cast<std::size_t>(shard.plan->num_chunks());
  }
  const CallStats stats = communicator.prepare_differences(all, timeout, stream);
  count(stats);
  // Each chunk has sent a header.
  for (const Shard& shard : shards) {
    if (!shard.site || num_chunks == 0) continue;
    CallStats part;
    part.inter_node_bytes = stats.inter_node_bytes / num_chunks * static_cast<std::size_t>(shard.plan->num_chunks());
    shard.site->cost.add(part);
  }
}

CallSummary DifferencePrepareJob::summary() const {
  std::int64_t num_elements = 0;
  for (const Shard& shard : shards) num_elements += shard.values.num_elements;
  return {"_allgather_base", num_elements, 0};
}

void DifferenceGatherJob::run(Communicator& communicator, StreamView stream) {
  count(shard ? communicator.all_gather(*plan, *shard, slots, held->kept, timeout, stream)
              : communicator.gather_secondary(*plan, held->kept, slots, timeout, stream));
}

CallSummary DifferenceGatherJob::summary() const { return summary_of_gather(*this, plan->rank(), slots); }

void GatherSecondaryJob::run(Communicator& communicator, StreamView stream) {
  communicator.set_seed(seed);
  count(communicator.gather_secondary(*plan, secondary, slots, timeout, stream));
}

CallSummary GatherSecondaryJob::summary() const { return summary_of_gather(*this, plan->rank(), slots); }

void ReduceScatterJob::run(Communicator& communicator, StreamView stream) {
  communicator.set_seed(seed);
  sample(*this, Collective::reduce_scatter, slots, plan->segments(), communicator, stream);
  count(communicator.reduce_scatter(*plan, slots, output, factor, timeout, stream, feedback ? &*feedback : nullptr));
}

CallSummary ReduceScatterJob::summary() const {
  const char* name = type == ::c10d::OpType::REDUCE_SCATTER ? "reduce_scatter" : "_reduce_scatter_base";
  return {name, elements_of(slots), output.num_elements};
}

void AllReduceJob::run(Communicator& communicator, StreamView stream) {
  communicator.set_seed(seed);
  // The whole tensor: its shards are made of whole blocks.
  const std::vector<Segment<HopFormats>> whole{{tensor.num_elements, plan->reduce().segments()[0].format}};
  sample(*this, Collective::all_reduce, std::vector{tensor}, std::span(whole), communicator, stream);
  count(communicator.all_reduce(*plan, tensor, factor, timeout, stream, feedback ? &*feedback : nullptr));
}

CallSummary AllReduceJob::summary() const { return {"allreduce", tensor.num_elements, tensor.num_elements}; }

}  // namespace zcomm::c10d_binding
