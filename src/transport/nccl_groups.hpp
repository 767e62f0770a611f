// NCCL groups: messages that go out together, and the CUDA events that mark their end.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/nccl_communicator.hpp"

namespace zcomm {

// Collective, from one begin() to the next.
struct NcclCall {
  std::string text = "a transfer without begin()";
  std::chrono::milliseconds timeout{};
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

  std::string in() const { return "in " + text + ": "; }
};

// Reusable once all its transfers were waited for and, if it is watched, done.
struct NcclGroup {
  NcclMessages messages;
  int num_waits = 0;                     // transfers that were not waited for
  std::shared_ptr<const NcclCall> call;  // null until the group is launched
  Event done;
  bool is_captured = false;
  bool is_watched = false;
};

// Pool of groups. Not thread-safe.
class NcclGroups {
 public:
  // Returns a reusable group, or null.
  NcclGroup* take() {
    if (idle_.empty()) collect_done();
    if (idle_.empty()) return nullptr;
    NcclGroup* const group = idle_.back();
    idle_.pop_back();
    return group;
  }
  // Adds a group in use.
  NcclGroup& add(std::unique_ptr<NcclGroup> group) {
    idle_.reserve(all_.size() + 1);  // so that putting one back never allocates
    watched_.reserve(all_.size() + 1);
    return *all_.emplace_back(std::move(group));
  }
  // Adds a group to those that collect_done() queries. Groups end in the order of these calls.
  void watch(NcclGroup& group) {
    watched_.push_back(&group);
    group.is_watched = true;
  }
  // Makes a group reusable, unless something still uses it.
  void put_back_if_over(NcclGroup& group) {
    if (group.num_waits > 0 || group.is_watched) return;
    group.messages = {};
    group.call.reset();
    idle_.push_back(&group);
  }

  void collect_done() {
    std::size_t num_done = 0;
    for (; num_done < watched_.size() && watched_[num_done]->done.is_over("finish a transfer"); ++num_done) {
      watched_[num_done]->is_watched = false;
      put_back_if_over(*watched_[num_done]);
    }
    watched_.erase(watched_.begin(), watched_.begin() + static_cast<std::ptrdiff_t>(num_done));
  }
  // Tells whether a watched group is not done, as of the last collect_done().
  bool any_watched() const { return !watched_.empty(); }
  // Returns the first watched group whose deadline is over, or null.
  const NcclGroup* find_overdue(std::chrono::steady_clock::time_point now) const {
    const auto is_overdue = [now](const NcclGroup* group) { return now >= group->call->deadline; };
    const auto found = std::ranges::find_if(watched_, is_overdue);
    return found == watched_.end() ? nullptr : *found;
  }

 private:
  std::vector<std::unique_ptr<NcclGroup>> all_;
  std::vector<NcclGroup*> idle_;
  std::vector<NcclGroup*> watched_;
};

}  // namespace zcomm
