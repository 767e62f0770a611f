// NCCL groups in progress, and the CUDA events that mark their end.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cuda/owned.hpp"

namespace zcomm {

// Collective, from one begin() to the next.
struct NcclCall {
  std::string text = "a transfer without begin()";
  std::chrono::milliseconds timeout{};
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

  std::string in() const { return "in " + text + ": "; }
};

// Record of a group. Reusable once all its transfers were waited for and, if it is watched, done.
struct Flight {
  Event done;
  std::shared_ptr<const NcclCall> call;
  int num_waits = 0;  // still expected
  bool is_watched = false;
};

// Pool of flights. Not thread-safe.
class NcclFlights {
 public:
  // Returns a reusable flight, or null.
  Flight* take();
  // Adds a flight in use.
  Flight& add(std::unique_ptr<Flight> flight);
  // Adds a flight to those that collect_done() queries. Flights end in the order of these calls.
  void watch(Flight& flight);
  void mark_waited(Flight& flight);

  void collect_done();
  // Tells whether a watched flight is not done, as of the last collect_done().
  bool any_watched() const { return !watched_.empty(); }
  const Flight* find_overdue(std::chrono::steady_clock::time_point now) const;  // or null

 private:
  void put_back_if_over(Flight& flight);

  std::vector<std::unique_ptr<Flight>> all_;
  std::vector<Flight*> idle_;
  std::vector<Flight*> watched_;
};

}  // namespace zcomm
