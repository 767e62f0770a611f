#include "stats.hpp"

#include "job.hpp"

namespace zcomm::c10d_binding {

void Stats::ended(const Job& job, const CallStats& cost) {
  Compressed& of_kind = job.rehearsal ? rehearsals_cost : compressed(job.collective);
  of_kind.add(cost);
  if (job.site) job.site->add(cost);
  std::int64_t total = 0;
  for (const auto& [other, share] : job.shares) total += share;
  for (const auto& [other, share] : job.shares) {
    if (!other || total == 0) continue;
    CallStats part;
    part.inter_node_bytes = cost.inter_node_bytes / static_cast<std::size_t>(total) * static_cast<std::size_t>(share);
    other->cost.add(part);
  }
}

}  // namespace zcomm::c10d_binding
