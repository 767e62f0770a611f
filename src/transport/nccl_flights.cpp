#include "transport/nccl_flights.hpp"

#include <algorithm>
#include <utility>

namespace zcomm {

NcclFlights::~NcclFlights() {
  for (const auto& flight : all_) static_cast<void>(cudaEventDestroy(flight->done));
  static_cast<void>(cudaGetLastError());
}

Flight& NcclFlights::take(std::shared_ptr<const NcclCall> call) {
  if (idle_.empty()) collect_done();
  if (idle_.empty()) {
    auto fresh = std::make_unique<Flight>();
    all_.reserve(all_.size() + 1);
    idle_.reserve(all_.size() + 1);
    check_cuda(cudaEventCreateWithFlags(&fresh->done, cudaEventDisableTiming), "create an event");
    idle_.push_back(all_.emplace_back(std::move(fresh)).get());
  }
  Flight& flight = *idle_.back();
  idle_.pop_back();
  flight.call = std::move(call);
  flight.is_waited = false;
  return flight;
}

void NcclFlights::watch(Flight& flight, std::size_t lane) {
  watched_[lane].push_back(&flight);
  flight.is_watched = true;
}

void NcclFlights::mark_waited(Flight& flight) {
  flight.is_waited = true;
  put_back_if_over(flight);
}

void NcclFlights::put_back_if_over(Flight& flight) {
  if (!flight.is_waited || flight.is_watched) return;
  flight.call.reset();
  idle_.push_back(&flight);
}

void NcclFlights::collect_done() {
  const RelaxedCapture relaxed;
  for (std::vector<Flight*>& lane : watched_) {
    std::size_t num_done = 0;
    for (; num_done < lane.size(); ++num_done) {
      const cudaError_t result = cudaEventQuery(lane[num_done]->done);
      if (result == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());
        break;
      }
      check_cuda(result, "finish a transfer");
      lane[num_done]->is_watched = false;
      put_back_if_over(*lane[num_done]);
    }
    lane.erase(lane.begin(), lane.begin() + static_cast<std::ptrdiff_t>(num_done));
  }
}

bool NcclFlights::any_watched() const {
  return std::any_of(watched_.begin(), watched_.end(), [](const auto& lane) { return !lane.empty(); });
}

const Flight* NcclFlights::find_overdue(std::chrono::steady_clock::time_point now) const {
  for (const std::vector<Flight*>& lane : watched_) {
    for (const Flight* flight : lane) {
      if (now >= flight->call->deadline) return flight;
    }
  }
  return nullptr;
}

}  // namespace zcomm
