#include "job.hpp"

#include "profiling.hpp"

namespace zcomm::c10d_binding {

void Job::run(const std::function<Communicator&()>& connect, StreamView stream, GroupErrors& errors) {
  try {
    Communicator& communicator = connect();
    communicator.set_seed(seed);
    for (Observer* const each : observers) each->starts(*this, communicator, stream);
    const CallStats cost = communicator.run(*operation, arguments(), settings.timeout, stream, profilers_ranges());
    for (Observer* const each : observers) each->ran(*this, cost);
  } catch (const std::exception& error) {
    for (Observer* const each : observers) each->failed(*this);
    const std::exception_ptr recorded = errors.record(error, site ? site->name : "");
    errors.announce();
    std::rethrow_exception(recorded);
  }
}

const char* Job::title() const {
  if (!shares.empty()) return "zcomm:prepare_lossless";
  if (call.collective == Collective::all_gather && read.empty()) return "zcomm:gather_secondary";
  return traits_of(call.collective).title;
}

}  // namespace zcomm::c10d_binding
