// Slots of a plan: checks of their shape, and who keeps which for its node.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "zcomm/error.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

inline void check_rank(const Topology& topology, int rank, const char* name) {
  check_argument(rank >= 0 && rank < topology.size(), [&] {
    return std::string(name) + ": expected 0 to " + std::to_string(topology.size() - 1) + ", got " +
           std::to_string(rank);
  });
}

inline void check(const World& world) {
  check_rank(world.topology, world.rank, "rank");
  check_argument(world.chunk_bytes > 0, [] { return std::string("chunk_bytes: expected at least 1, got 0"); });
}

// Returns `slots`.
template <class Format>
SlotShape checked(SlotShape slots, const World& world, std::span<const Segment<Format>> segments) {
  check(world);
  const Topology& topology = world.topology;
  check_argument(slots.lengths.size() == static_cast<std::size_t>(topology.size()), [&] {
    return "slots: expected one for each of " + std::to_string(topology.size()) + " ranks, got " +
           std::to_string(slots.lengths.size());
  });
  for (const std::int64_t length : slots.lengths) {
    check_argument(length >= 0,
                   [&] { return "slots: expected 0 or more elements in each, got " + std::to_string(length); });
  }
  std::int64_t total = 0;
  for (const Segment<Format>& segment : segments) {
    check_argument(segment.num_elements >= 0, [&] {
      return "segments: expected 0 or more elements in each, got " + std::to_string(segment.num_elements);
    });
    total += segment.num_elements;
  }
  check_argument(total == slots.longest(), [&] {
    return "segments: expected the " + std::to_string(slots.longest()) + " elements of the longest slot, got " +
           std::to_string(total);
  });
  return slots;
}

inline std::vector<int> in_rank_order(const Topology& topology) {
  std::vector<int> slots(static_cast<std::size_t>(topology.size()));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// Returns those of `slots` that `rank` holds, in the given order.
inline std::vector<int> held_of(const Topology& topology, int rank, std::vector<int> slots) {
  std::erase_if(slots, [&](int slot) { return topology.holder(topology.node(rank), slot) != rank; });
  return slots;
}

// Returns the most slots that any rank holds.
inline std::size_t most_held(const Topology& topology) {
  std::size_t most = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    // Looks at the first rank of each node: slots are dealt to a node's ranks in turn, the first one first.
    most = std::max(most, held_of(topology, topology.ranks(node).front(), in_rank_order(topology)).size());
  }
  return most;
}

// Returns the place of each rank's slot among `slots`, -1 if it is not there.
inline std::vector<int> places_in(const std::vector<int>& slots, const Topology& topology) {
  std::vector<int> places(static_cast<std::size_t>(topology.size()), -1);
  for (std::size_t i = 0; i < slots.size(); ++i) places[static_cast<std::size_t>(slots[i])] = static_cast<int>(i);
  return places;
}

}  // namespace zcomm
