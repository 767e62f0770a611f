// Counters of a group's calls, and of those of a place in the program.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "policy.hpp"
#include "zcomm/collectives.hpp"

namespace zcomm::c10d_binding {

struct Stats {
  using Counter = std::atomic<std::uint64_t>;

  // Number of calls and their bytes, of the gathered, scattered or reduced tensor.
  struct Calls {
    Counter calls{0};
    Counter bytes{0};
    void add(std::int64_t num_bytes) {
      calls.fetch_add(1, std::memory_order_relaxed);
      bytes.fetch_add(static_cast<std::uint64_t>(num_bytes), std::memory_order_relaxed);
    }
  };
  struct OfHop {
    Counter intra_node_bytes{0};
    Counter inter_node_bytes{0};
    Counter wait_ns{0};
    void add(const HopStats& stats) {
      intra_node_bytes += stats.intra_node_bytes;
      inter_node_bytes += stats.inter_node_bytes;
      wait_ns += static_cast<std::uint64_t>(stats.wait_time.count());
    }
  };
  struct Compressed {
    Counter intra_node_bytes{0};  // sent by this rank to ranks of its node
    Counter inter_node_bytes{0};  // sent by this rank to other nodes
    Counter codec_ns{0};
    Counter transfer_ns{0};
    Counter host_waits{0};  // times that the host has waited for the GPU
    std::array<OfHop, kMaxHops> hops;
    void add(const CallStats& stats) {
      intra_node_bytes += stats.intra_node_bytes;
      inter_node_bytes += stats.inter_node_bytes;
      codec_ns += static_cast<std::uint64_t>(stats.codec_time.count());
      transfer_ns += static_cast<std::uint64_t>(stats.transfer_time.count());
      host_waits += static_cast<std::uint64_t>(stats.host_waits);
      for (std::size_t hop = 0; hop < kMaxHops; ++hop) hops[hop].add(stats.hops[hop]);
    }
  };

  Calls& calls(Collective collective, Verdict verdict) {
    return by_verdict[static_cast<std::size_t>(collective)][static_cast<std::size_t>(verdict)];
  }
  Compressed& compressed(Collective collective) { return by_collective[static_cast<std::size_t>(collective)]; }

  std::array<std::array<Calls, kNumVerdicts>, kCollectives.size()> by_verdict;
  std::array<Compressed, kCollectives.size()> by_collective;
  Calls rehearsals;  // of policy="auto", on scratch; counted nowhere else
  Compressed rehearsals_cost;
  Counter plans{0};  // made for compressed calls
  Calls others;      // calls that the policy does not decide about

  // Whether ranks of the node share memory: "" before the first call that asks, "shared", or why they do not.
  std::string node_memory() {
    const std::lock_guard lock(mutex_);
    return node_memory_;
  }
  void set_node_memory(std::string text) {
    const std::lock_guard lock(mutex_);
    node_memory_ = std::move(text);
  }

 private:
  std::mutex mutex_;
  std::string node_memory_;
};

// Place in a program that calls collectives, with counters of its own.
struct Site {
  // Returns the telemetry's name of the `index`-th of `count` segments that are not exact.
  std::string name_of_part(std::size_t index, std::size_t count) const {
    return parts.size() == count ? name + "." + parts[index] : name;
  }

  const std::string name;
  const std::vector<std::string> parts;
  Stats::Counter calls{0};
  Stats::Compressed cost;
};

using SitePtr = std::shared_ptr<Site>;  // null: unknown place

}  // namespace zcomm::c10d_binding
