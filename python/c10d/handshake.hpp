// What all ranks of a group compare before its first collective.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "group_errors.hpp"
#include "zcomm/topology.hpp"

namespace zcomm::c10d_binding {

class Handshake {
 public:
  // `compare` waits for all ranks, and returns the node of each; `errors` outlives this.
  Handshake(std::function<std::vector<int>()> compare, GroupErrors& errors)
      : compare_(std::move(compare)), errors_(errors) {}

  // Compares, the first time; throws what differs. Any thread.
  const Topology& topology();

 private:
  std::function<std::vector<int>()> compare_;
  GroupErrors& errors_;
  std::mutex mutex_;
  std::atomic<bool> is_done_{false};
  std::optional<Topology> topology_;
};

}  // namespace zcomm::c10d_binding
