// The NCCL groups that are under way, and the CUDA events that tell when they are done.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cuda/check.hpp"

namespace zcomm {

// One collective, from begin() to the next.
struct NcclCall {
  std::string text = "a transfer without begin()";
  std::chrono::milliseconds timeout{};
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

  std::string in() const { return "in " + text + ": "; }
};

// Used again once all its transfers were waited for and, if it is watched, done.
struct Flight {
  cudaEvent_t done = nullptr;
  std::shared_ptr<const NcclCall> call;
  int num_waits = 0;  // to come
  bool is_watched = false;
};

// Not thread-safe.
class NcclFlights {
 public:
  NcclFlights() = default;
  ~NcclFlights();
  NcclFlights(const NcclFlights&) = delete;
  NcclFlights& operator=(const NcclFlights&) = delete;

  // One that can be used again, or null.
  Flight* take();
  // A new one, taken. Owns `done`.
  Flight& add(cudaEvent_t done);
  // From now on collect_done() looks at it. Flights are done in the order of these calls.
  void watch(Flight& flight);
  void mark_waited(Flight& flight);

  void collect_done();
  // Of those that are watched and, as far as collect_done() knows, not done.
  bool any_watched() const { return !watched_.empty(); }
  const Flight* find_overdue(std::chrono::steady_clock::time_point now) const;  // or null

 private:
  void put_back_if_over(Flight& flight);

  std::vector<std::unique_ptr<Flight>> all_;
  std::vector<Flight*> idle_;
  std::vector<Flight*> watched_;
};

}  // namespace zcomm
