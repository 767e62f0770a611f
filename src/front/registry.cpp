#include "front/registry.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace zcomm::front {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<nccl::Comm, std::shared_ptr<Parent>> parents;
  std::atomic<bool> is_used{false};         // false: there are none
  std::atomic<bool> has_compressed{false};  // a call
};

Registry& registry() {
  static Registry& all = *new Registry;  // never destroyed
  return all;
}

// Writes what nobody has ended. The communicators stay: nothing of CUDA may be called when a process ends.
void report_the_rest() {
  const std::lock_guard lock(registry().mutex);
  for (const auto& [comm, parent] : registry().parents) parent->report();
  if (!registry().has_compressed) {
    std::fprintf(stderr, "zcomm's front of NCCL compressed no call: ZCOMM_LOG=info shows the reasons\n");
  }
  for (const Rule& rule : settings().rules) {
    if (!*rule.has_matched) std::fprintf(stderr, "ZCOMM_RULES: no call matched '%s'\n", rule.text.c_str());
  }
}

}  // namespace

std::shared_ptr<Parent> parent_of(nccl::Comm comm, const char* name) {
  const std::lock_guard lock(registry().mutex);
  if (!registry().is_used.exchange(true)) std::atexit(report_the_rest);
  std::shared_ptr<Parent>& parent = registry().parents[comm];
  if (parent == nullptr) parent = std::make_shared<Parent>(comm, name);
  return parent;
}

std::shared_ptr<Parent> known_parent_of(nccl::Comm comm) {
  if (!registry().is_used) return nullptr;
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().parents.find(comm);
  return found == registry().parents.end() ? nullptr : found->second;
}

std::shared_ptr<Parent> end_communicator(nccl::Comm comm, bool aborts) {
  std::shared_ptr<Parent> parent = known_parent_of(comm);
  if (parent == nullptr) return parent;
  parent->leave();
  if (aborts) {
    parent->abort();
  } else {
    parent->close();
  }
  parent->report();
  const std::lock_guard lock(registry().mutex);
  registry().parents.erase(comm);
  return parent;
}

void note_compressed() { registry().has_compressed = true; }

}  // namespace zcomm::front
