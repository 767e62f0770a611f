// Counters of a group's calls, and of the places in a program that make them.
#pragma once

#include <c10/util/Synchronized.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "c10d/policy/policy.hpp"
#include "observer.hpp"

namespace zcomm::c10d_binding {

struct Stats {
  // Number of calls and their bytes, of the gathered, scattered or reduced tensor.
  struct Calls {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
    void add(std::int64_t num_bytes) {
      ++calls;
      bytes += static_cast<std::uint64_t>(num_bytes);
    }
  };

  Calls& calls(Collective collective, Verdict verdict) {
    return by_verdict[static_cast<std::size_t>(collective)][static_cast<std::size_t>(verdict)];
  }
  // Returns the sums of compressed calls.
  CallStats& cost(Collective collective) { return cost_of[static_cast<std::size_t>(collective)]; }

  std::array<std::array<Calls, kNumVerdicts>, kCollectives.size()> by_verdict;
  std::array<CallStats, kCollectives.size()> cost_of;
  Calls rehearsals;  // of compress="auto", on scratch; counted nowhere else
  CallStats rehearsals_cost;
  Calls others;  // calls that the policy does not decide about
  // Whether ranks of the node share memory: "" before the first call that asks, "shared", or why they do not.
  std::string node_memory;
};

struct Site {
  // Returns the telemetry's name of the `index`-th of `count` segments that are not exact.
  std::string name_of_part(std::size_t index, std::size_t count) const {
    return parts.size() == count ? name + "." + parts[index] : name;
  }

  const std::string name;
  const std::vector<std::string> parts;
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> intra_node_bytes{0};  // sent by this rank, like the next one
  std::atomic<std::uint64_t> inter_node_bytes{0};
};

using SitePtr = std::shared_ptr<Site>;  // null: unknown place

// Adds up the cost of jobs, of the group and of their sites.
class SharedStats final : public Observer {
 public:
  template <class Use>
  auto withLock(Use&& use) {
    return stats_.withLock(use);
  }
  void ran(const Job& job, const CallStats& cost) override;

 private:
  c10::Synchronized<Stats> stats_;
};

}  // namespace zcomm::c10d_binding
