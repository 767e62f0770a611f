// The NCCL transfers that are under way, and the CUDA events that tell when they are done.
#pragma once

#include <array>
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

// Used again once it was waited for and, if it is watched, done.
struct Flight {
  cudaEvent_t done = nullptr;
  std::shared_ptr<const NcclCall> call;
  bool is_waited = false;
  bool is_watched = false;
};

// Not thread-safe.
class NcclFlights {
 public:
  static constexpr std::size_t kNumLanes = 2;

  NcclFlights() = default;
  ~NcclFlights();
  NcclFlights(const NcclFlights&) = delete;
  NcclFlights& operator=(const NcclFlights&) = delete;

  // Creates an event only where no flight can be used again.
  Flight& take(std::shared_ptr<const NcclCall> call);
  // From now on collect_done() looks at it. Flights of a lane are done in the order of these calls.
  void watch(Flight& flight, std::size_t lane);
  void mark_waited(Flight& flight);

  void collect_done();
  // Of those that are watched and, as far as collect_done() knows, not done.
  bool any_watched() const;
  const Flight* find_overdue(std::chrono::steady_clock::time_point now) const;  // or null

 private:
  void put_back_if_over(Flight& flight);

  std::vector<std::unique_ptr<Flight>> all_;
  std::vector<Flight*> idle_;
  std::array<std::vector<Flight*>, kNumLanes> watched_;
};

}  // namespace zcomm
