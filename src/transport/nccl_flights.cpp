#include "transport/nccl_flights.hpp"

#include <utility>

namespace zcomm {

Flight* NcclFlights::take() {
  if (idle_.empty()) collect_done();
  if (idle_.empty()) return nullptr;
  Flight* flight = idle_.back();
  idle_.pop_back();
  return flight;
}

Flight& NcclFlights::add(std::unique_ptr<Flight> flight) {
  idle_.reserve(all_.size() + 1);  // so that putting one back never allocates
  watched_.reserve(all_.size() + 1);
  return *all_.emplace_back(std::move(flight));
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
  std::size_t num_done = 0;
  for (; num_done < watched_.size() && watched_[num_done]->done.is_over("finish a transfer"); ++num_done) {
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
