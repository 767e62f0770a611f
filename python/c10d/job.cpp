#include "job.hpp"

#include "flight_recorder.hpp"
#include "profiling.hpp"
#include "telemetry.hpp"

namespace zcomm::c10d_binding {
namespace {

void count_cost(Stats& stats, const Job& job, const CallStats& cost) {
  (job.rehearsal ? stats.rehearsals_cost : stats.compressed(job.collective)).add(cost);
  if (job.site) {
    ++job.site->calls;
    job.site->cost.add(cost);
  }
  std::int64_t total = 0;
  for (const auto& [other, share] : job.shares) total += share;
  for (const auto& [other, share] : job.shares) {
    if (!other || total == 0) continue;
    other->cost.inter_node_bytes +=
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
    count_cost(*stats, *this, communicator.run(*operation, arguments(), timeout, stream, profilers_ranges()));
    if (outputs[0].is_cpu()) recorder.end(record, false);  // on a GPU the work is queued
  } catch (const std::exception& error) {
    recorder.end(record, true);
    std::rethrow_exception(errors.record(error, site ? site->name : ""));
  }
}

}  // namespace zcomm::c10d_binding
