// Prints what the default collectives would take on GPUs, by the model of simulated_gpu.hpp. Nothing here is measured.
#include <cstdio>
#include <string>

#include "machines.hpp"

namespace zcomm::model {
namespace {

std::string microseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.0f", seconds * 1e6);
  return text;
}

void print_assumptions(const Assumptions& a) {
  std::printf(
      "Assumed (microseconds): the host takes %.1f to queue a kernel, %.1f an event, %.1f an NCCL group and %.1f "
      "for each of its messages.\n",
      a.launch_host * 1e6, a.event_host * 1e6, a.group_host * 1e6, a.message_host * 1e6);
  std::printf(
      "A kernel starts within %.1f. A group moves its first byte after %.1f, %.1f more for each peer, %.1f more "
      "over a network.\n",
      a.kernel_start * 1e6, a.group_start * 1e6, a.peer_start * 1e6, a.network_start * 1e6);
  std::printf(
      "Kernels read and write %.2f TB/s, and run %.1f T instructions per second. Links reach %.0f %% of their "
      "rate, networks %.0f %%.\n",
      a.memory_rate / 1e12, a.instruction_rate / 1e12, a.intra_share * 100, a.inter_share * 100);
  std::printf("Exact calls are NCCL's ring: %.1f to start, %.1f for each step in a node, %.1f between nodes.\n\n",
              a.exact_start * 1e6, a.ring_step * 1e6, a.network_ring_step * 1e6);
}

// The columns of one collective.
std::string columns(const Machine& machine, Kind kind, std::size_t num_bytes, double exact) {
  const double before = simulate(machine, kind, num_bytes, kDefaultChunkBytes).end();
  const double now = simulate(machine, kind, num_bytes, default_gpu_chunk_bytes(machine.size())).end();
  char gain[32];
  std::snprintf(gain, sizeof(gain), "%.2f", exact / now);
  return " | " + microseconds(before) + " | " + microseconds(now) + " | " + gain;
}

void print_table() {
  std::printf(
      "| GPUs | MiB | exact NCCL | all-gather, chunks of 1 MiB | default | times as fast | reduce-scatter, chunks of "
      "1 MiB | default | times as fast |\n|---|---|---|---|---|---|---|---|---|\n");
  for (const Machine& machine : machines()) {
    for (const std::size_t mebibytes : kMebibytes) {
      const std::size_t num_bytes = mebibytes << 20;
      const double exact = exact_seconds(machine, num_bytes);
      std::printf("| %s | %zu | %s%s%s |\n", machine.name.c_str(), mebibytes, microseconds(exact).c_str(),
                  columns(machine, Kind::all_gather, num_bytes, exact).c_str(),
                  columns(machine, Kind::reduce_scatter, num_bytes, exact).c_str());
    }
  }
}

// All-reduces of more than one chunk.
void print_all_reduce() {
  std::printf(
      "\n| GPUs | MiB | all-reduce as two calls: groups, time | as one pipeline: groups, time | times as fast |\n"
      "|---|---|---|---|---|\n");
  for (const Machine& machine : machines()) {
    for (const std::size_t mebibytes : {256, 1024, 4096}) {
      const std::size_t chunk_bytes = default_gpu_chunk_bytes(machine.size());
      const Clock in_turn = simulate(machine, Kind::all_reduce_in_turn, mebibytes << 20, chunk_bytes);
      const Clock one = simulate(machine, Kind::all_reduce, mebibytes << 20, chunk_bytes);
      std::printf("| %s | %zu | %d, %s | %d, %s | %.2f |\n", machine.name.c_str(), mebibytes, in_turn.num_groups,
                  microseconds(in_turn.end()).c_str(), one.num_groups, microseconds(one.end()).c_str(),
                  in_turn.end() / one.end());
    }
  }
}

}  // namespace
}  // namespace zcomm::model

int main() {
  zcomm::model::print_assumptions({});
  zcomm::model::print_table();
  zcomm::model::print_all_reduce();
}
