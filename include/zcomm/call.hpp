// Compressed collectives: schedules of a codec and a transport, the same for CPU and GPU. operation.hpp describes each.
//
// They implement qwZ and qgZ of ZeRO++ (arXiv 2306.10209), with formats per hop as in SDP4Bit (arXiv 2410.15526). Long
// messages are cut into chunks of whole blocks, and stages run as a pipeline: stage s of chunk k overlaps stage s-1 of
// chunk k+1. Chunking does not change a bit of the result.
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

inline constexpr std::size_t kMaxHops = 4;  // all_reduce: two of its reduce_scatter, then two of its all_gather

// Cost of one call on this rank.
struct CallStats {
  std::size_t intra_node_bytes = 0;                               // sent to ranks of the same node
  std::size_t inter_node_bytes = 0;                               // sent to other nodes
  std::array<LinkBytes, kMaxHops> bytes_by_hop = {};              // the same bytes
  std::chrono::nanoseconds codec_time{0};                         // in codec calls; on a GPU, the time to launch them
  std::chrono::nanoseconds transfer_time{0};                      // waiting for transfers, or launching them on a GPU
  std::array<std::chrono::nanoseconds, kMaxHops> wait_time = {};  // by hop, without starts: a part of transfer_time
  int host_waits = 0;                                             // times that the host has waited for the GPU

  std::size_t wire_bytes() const { return intra_node_bytes + inter_node_bytes; }
};

class Preparations;

// Begins a range of a profiler, named by a literal. The range ends with its result; null: no profiler is on.
using BeginRange = std::shared_ptr<void> (*)(const char* name);

// Resources of a collective, borrowed for one call.
struct Resources {
  const Codec& codec;
  Transport& transport;
  const World& world;
  Workspace& workspace;
  StreamView stream;
  CallStats& stats;
  Preparations& preparations;        // of lossless gathers
  BeginRange begin_range = nullptr;  // around calls of the codec and the transport
  std::uint64_t seed = 0;            // of stochastic rounding, different for each call
};

}  // namespace zcomm
