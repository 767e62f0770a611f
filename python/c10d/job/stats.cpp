#include "stats.hpp"

#include "job.hpp"
#include "shares.hpp"

namespace zcomm::c10d_binding {
namespace {

void add(CallStats& sums, const CallStats& cost) {
  sums.intra_node_bytes += cost.intra_node_bytes;
  sums.inter_node_bytes += cost.inter_node_bytes;
  sums.codec_time += cost.codec_time;
  sums.transfer_time += cost.transfer_time;
  sums.host_waits += cost.host_waits;
  for (std::size_t hop = 0; hop < kMaxHops; ++hop) {
    sums.bytes_by_hop[hop] = sums.bytes_by_hop[hop] + cost.bytes_by_hop[hop];
    sums.wait_time[hop] += cost.wait_time[hop];
  }
}

}  // namespace

void SharedStats::ran(const Job& job, const CallStats& cost) {
  withLock([&](Stats& stats) {
    add(job.settings.rehearsal ? stats.rehearsals_cost : stats.cost(job.call.collective), cost);
  });
  if (job.site) {
    ++job.site->calls;
    job.site->intra_node_bytes += cost.intra_node_bytes;
    job.site->inter_node_bytes += cost.inter_node_bytes;
  }
  std::vector<std::uint64_t> shares;
  for (const auto& [other, share] : job.shares) shares.push_back(static_cast<std::uint64_t>(share));
  const std::vector<std::uint64_t> parts = apportion(cost.inter_node_bytes, shares);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (const SitePtr& other = job.shares[i].first) other->inter_node_bytes += parts[i];
  }
}

}  // namespace zcomm::c10d_binding
