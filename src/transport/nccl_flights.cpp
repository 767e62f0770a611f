#include "transport/nccl_flights.hpp"

#include <utility>

namespace zcomm {

NcclFlights::~NcclFlights() {
  for (const auto& flight : all_) static_cast<void>(cudaEventDestroy(flight->done));
  static_cast<void>(cudaGetLastError());
}

Flight* NcclFlights::take() {
  if (idle_.empty()) collect_done();
  if (idle_.empty()) return nullptr;
  Flight* flight = idle_.back();
  idle_.pop_back();
  return flight;
}

Flight& NcclFlights::add(cudaEvent_t done) {
  auto fresh = std::make_unique<Flight>();
  fresh->done = done;
  idle_.reserve(all_.size() + 1);  // so that putting one back never allocates
  watched_.reserve(all_.size() + 1);
  return *all_.emplace_back(std::move(fresh));
}

void NcclFlights::watch(Flight& flight) {
  watched_.push_back(&flight);
  flight.is_watched = true;
}

void NcclFlights::mark_waited(Flight& flight) {
  --flight.num_waits;
  put_back_if_over(flight);
}

void NcclFlights::put_back_if_over(Flight& flight) {
  if (flight.num_waits > 0 || flight.is_watched) return;
  flight.call.reset();
  idle_.push_back(&flight);
}

void NcclFlights::collect_done() {
  const RelaxedCapture relaxed;
  std::size_t num_done = 0;
  for (; num_done < watched_.size(); ++num_done) {
    const cudaError_t result = cudaEventQuery(watched_[num_done]->done);
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      break;
    }
    check_cuda(result, "finish a transfer");
    watched_[num_done]->is_watched = false;
    put_back_if_over(*watched_[num_done]);
  }
  watched_.erase(watched_.begin(), watched_.begin() + static_cast<std::ptrdiff_t>(num_done));
}

const Flight* NcclFlights::find_overdue(std::chrono::steady_clock::time_point now) const {
  for (const Flight* flight : watched_) {
    if (now >= flight->call->deadline) return flight;
  }
  return nullptr;
}

}  // namespace zcomm
