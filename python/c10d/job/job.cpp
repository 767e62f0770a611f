#include "job.hpp"

#include "flight_recorder.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {
namespace {

void add(CallStats& sums, const CallStats& cost) {
  sums.intra_node_bytes += cost.intra_node_bytes;
  sums.inter_node_bytes += cost.inter_node_bytes;
  sums.codec_time += cost.codec_time;
  sums.transfer_time += cost.transfer_time;
  sums.host_waits += cost.host_waits;
  for (std::size_t hop = 0; hop < kMaxHops; ++hop) {
    sums.bytes_by_hop[hop] = sums.bytes_by_hop[hop] + cost.bytes_by_hop[hop];
    sums.wait_time[hop] += cost.wait_time[hop];
  }
}

void count_cost(const Job& job, const CallStats& cost) {
  job.stats->withLock(
      [&](Stats& stats) { add(job.rehearsal ? stats.rehearsals_cost : stats.cost(job.collective), cost); });
  if (job.site) {
    ++job.site->calls;
    job.site->intra_node_bytes += cost.intra_node_bytes;
    job.site->inter_node_bytes += cost.inter_node_bytes;
  }
  std::int64_t total = 0;
  for (const auto& [other, share] : job.shares) total += share;
  for (const auto& [other, share] : job.shares) {
    if (!other || total == 0) continue;
    other->inter_node_bytes +=
        cost.inter_node_bytes / static_cast<std::size_t>(total) * static_cast<std::size_t>(share);
  }
}

}  // namespace

void Job::run(const std::function<Communicator&()>& connect, StreamView stream, GroupErrors& errors) {
  FlightRecorder& recorder = FlightRecorder::of_process();
  try {
    Communicator& communicator = connect();
    communicator.set_seed(seed);
    telemetry->add(*this, communicator, stream);
    count_cost(*this, communicator.run(*operation, arguments(), timeout, stream, profilers_ranges()));
    if (outputs[0].is_cpu()) recorder.end(record, false);  // on a GPU the work is queued
  } catch (const std::exception& error) {
    recorder.end(record, true);
    std::rethrow_exception(errors.record(error, site ? site->name : ""));
  }
}

}  // namespace zcomm::c10d_binding
