#include "gathered_wires.hpp"

namespace zcomm {

std::size_t secondary_bytes(const Topology& topology, int rank, std::size_t chunk_bytes,
                            std::span<const TensorView> slots, GatherSegments segments) {
  return SecondaryLayout(topology, rank, GatherPlan(chunk_bytes, slots, segments)).num_bytes();
}

void gather_secondary(const Resources& r, const std::byte* secondary, std::span<const TensorView> slots,
                      GatherSegments segments) {
  constexpr int kDepth = 2;  // stages
  const int rank = r.transport.rank();
  const int node = r.topology.node(rank);
  const GatherPlan plan(r.chunk_bytes, slots, segments);
  if (plan.num_chunks() == 0) return;
  // Wires that are kept are only read here: no rank of the node sends another what that one keeps.
  const GatheredWires wires(r, plan, const_cast<std::byte*>(secondary), kDepth);
  Ring<std::unique_ptr<Transfer>, kDepth> transfers;
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  GatheredWires::Jobs decodes;

  const auto exchange_inside_node = [&](std::int64_t chunk) {
    sends.clear();
    recvs.clear();
    for (int slot = 0; slot < r.transport.size(); ++slot) {
      const int owner = keeper(r.topology, node, slot);
      if (owner != rank) {
        recvs.push_back(wires.recv(owner, slot, chunk));
        continue;
      }
      for (const int peer : r.topology.ranks(node)) {
        if (peer != rank) sends.push_back(wires.send(peer, slot, chunk));
      }
    }
    transfers[chunk] = start_transfer(r, sends, recvs);
  };
  const auto decode_all = [&](std::int64_t chunk) {
    finish_transfer(r, transfers[chunk]);
    wires.decode(r, chunk, decodes);
  };

  run_pipeline(plan.num_chunks(), exchange_inside_node, decode_all);
}

}  // namespace zcomm
