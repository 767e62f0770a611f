// Handshake: all ranks compare their options before a group's first collective.
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
  // Takes `compare`, which returns the node of each rank; borrows `errors`.
  Handshake(std::function<std::vector<int>()> compare, GroupErrors& errors)
      : compare_(std::move(compare)), errors_(errors) {}

  // Compares at the first call; throws the difference. Thread-safe.
  const Topology& topology();

 private:
  std::function<std::vector<int>()> compare_;
  GroupErrors& errors_;
  std::mutex mutex_;
  std::atomic<bool> is_done_{false};
  std::optional<Topology> topology_;
};

}  // namespace zcomm::c10d_binding
