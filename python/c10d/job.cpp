#include "job.hpp"

#include <numeric>

#include "profiling.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

template <class Views>
std::int64_t elements_of(const Views& slots) {
  return std::accumulate(slots.begin(), slots.end(), std::int64_t{0},
                         [](std::int64_t total, const auto& slot) { return total + slot.num_elements; });
}

}  // namespace

CallSummary Job::summary() const {
  const bool is_list = type == ::c10d::OpType::ALLGATHER || type == ::c10d::OpType::REDUCE_SCATTER;
  switch (collective) {
    case Collective::all_gather: {
      const bool is_preparation = written.empty();
      const std::int64_t gathered = elements_of(written);
      return {is_list ? "all_gather" : "_allgather_base",
              is_preparation ? elements_of(read) : gathered / operation->world().topology.size(), gathered};
    }
    case Collective::reduce_scatter:
      return {is_list ? "reduce_scatter" : "_reduce_scatter_base", elements_of(read), written.front().num_elements};
    case Collective::all_reduce:
      return {"allreduce", written.front().num_elements, written.front().num_elements};
    case Collective::all_to_all:
      return {"all_to_all", elements_of(read), elements_of(written)};
    case Collective::gather:
      return {"gather", elements_of(read), elements_of(written)};
    case Collective::scatter:
      return {"scatter", elements_of(read), elements_of(written)};
    case Collective::broadcast:
      return {"broadcast", elements_of(written), elements_of(written)};
  }
  throw ArgumentError("collective: unknown value");
}

const std::string& Job::place() const {
  static const std::string unknown;
  return site ? site->name : unknown;
}

void Job::run(const std::function<Communicator&()>& connect, StreamView stream) {
  try {
    Communicator& communicator = connect();
    communicator.set_seed(seed);
    for (Observer* observer : observers) observer->started(*this, communicator, stream);
    const CallStats stats = communicator.run(*operation, arguments(), timeout, stream, profilers_ranges());
    for (Observer* observer : observers) observer->ended(*this, stats);
  } catch (...) {
    for (Observer* observer : observers) observer->failed(*this);
    throw;
  }
}

}  // namespace zcomm::c10d_binding
