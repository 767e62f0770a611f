// Cost of a call, and the resources that a collective uses.
//
// Compressed collectives are schedules of a codec and a transport, the same on CPUs and GPUs. They implement qwZ and
// qgZ of ZeRO++ (arXiv 2306.10209), with formats per hop as in SDP4Bit (arXiv 2410.15526).
//
// Long messages are cut into chunks of whole blocks, and stages run as a pipeline: stage s of chunk k overlaps stage
// s-1 of chunk k+1. Chunking does not change a bit of the result. operation.hpp describes each collective.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "zcomm/codec.hpp"
#include "zcomm/link.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// The most hops of a call. An all_reduce has two of its reduce_scatter, then two of its all_gather.
inline constexpr std::size_t kMaxHops = 4;

// Cost of one call on this rank. Byte counts include what the collective sends, not what the transport adds.
struct CallStats {
  std::size_t intra_node_bytes = 0;                   // sent to ranks of the same node
  std::size_t inter_node_bytes = 0;                   // sent to other nodes
  std::array<LinkBytes, kMaxHops> bytes_by_hop = {};  // the same bytes, by hop
  // Host time in codec calls. On a GPU it covers the launches, not the kernels.
  std::chrono::nanoseconds codec_time{0};
  // Host time in transport calls: starts and waits on a CPU, launches on a GPU.
  std::chrono::nanoseconds transfer_time{0};
  // The part of transfer_time that went into waits, by hop.
  std::array<std::chrono::nanoseconds, kMaxHops> wait_time = {};
  // Times that the host has waited for the GPU. Only lossless gathers and their preparations do.
  int host_waits = 0;

  // Returns the bytes sent on all links.
  std::size_t wire_bytes() const { return intra_node_bytes + inter_node_bytes; }
};

// Begins a range of a profiler. `name` is a string literal.
// The range ends when the result is destroyed. A null result means that no profiler is on.
using BeginRange = std::shared_ptr<void> (*)(const char* name);

// --- Internal: between Communicator and the operations. A caller needs nothing below.

class Preparations;

// Resources of a collective, borrowed for one call.
struct Resources {
  const Codec& codec;
  Transport& transport;
  const World& world;
  Workspace& workspace;
  StreamView stream;                 // of the call: all codec work and transfers are ordered on it
  CallStats& stats;                  // filled during the call
  Preparations& preparations;        // of lossless gathers
  BeginRange begin_range = nullptr;  // around calls of the codec and the transport; may be null
  std::uint64_t seed = 0;            // of stochastic rounding, different for each call
  Lanes* lanes = nullptr;            // of a call that uses them; null where kernels stay on `stream`
};

}  // namespace zcomm
