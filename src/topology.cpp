#include "zcomm/topology.hpp"

#include <algorithm>
#include <map>

#include "zcomm/error.hpp"

namespace zcomm {

Topology::Topology(std::span<const int> node_ids) {
  check_argument(!node_ids.empty(), [] { return std::string("node_ids: empty, need the node of every rank"); });
  std::map<int, int> number_of;  // given id -> our number
  for (int rank = 0; rank < static_cast<int>(node_ids.size()); ++rank) {
    const int id = node_ids[static_cast<std::size_t>(rank)];
    const int node = number_of.try_emplace(id, static_cast<int>(number_of.size())).first->second;
    if (node == num_nodes()) ranks_.emplace_back();
    auto& members = ranks_[static_cast<std::size_t>(node)];
    node_of_.push_back(node);
    local_rank_.push_back(static_cast<int>(members.size()));
    members.push_back(rank);
  }
}

bool Topology::is_hierarchical() const {
  const std::size_t node_size = ranks_.front().size();
  return num_nodes() > 1 && node_size > 1 &&
         std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& members) { return members.size() == node_size; });
}

std::string Topology::to_string() const {
  const std::size_t node_size = ranks_.front().size();
  const bool even =
      std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& members) { return members.size() == node_size; });
  if (even) return std::to_string(num_nodes()) + "x" + std::to_string(node_size);
  std::string text;
  for (const auto& members : ranks_) text += (text.empty() ? "" : "+") + std::to_string(members.size());
  return text;
}

}  // namespace zcomm
