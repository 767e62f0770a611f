// NCCL as a transport. It is opened at run time, never linked. In a build without CUDA, all functions throw Error that
// says so.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/transport.hpp"

namespace zcomm {

// Oldest supported version: earlier releases hang or crash when non-blocking communicators are aborted.
inline constexpr int kMinNcclVersion = 22703;  // 2.27.3

// Opens NCCL once per process, and returns that library's path and version in all calls; 22809 is 2.28.9. Tries in
// order: the file in ZCOMM_NCCL_LIB, the copy mapped in the process, `wheel_path` if it is not empty
// (nvidia/nccl/lib/libnccl.so.2 of the installed wheel), the soname libnccl.so.2. Never maps a second copy next to a
// mapped one. Throws TransportError that lists what was tried, or names the file and its missing symbol or too old
// version.
std::pair<std::string, int> load_nccl(const std::string& wheel_path = {});

using NcclUniqueId = std::array<std::byte, 128>;

// Identifies a group of ranks: one rank makes it, and the caller distributes it to the others.
NcclUniqueId make_nccl_unique_id();

// Ranks of a communicator that the caller owns, who now agree on a group of their own.
struct NcclBootstrap {
  int rank = 0;
  int device = 0;
  NcclUniqueId unique_id{};           // made by rank 0
  std::vector<std::uint64_t> tokens;  // of all ranks
};

// Hands each rank's `token`, and a new unique id, to all ranks of `communicator`, an ncclComm_t of the caller's. Called
// by all of them, while none calls anything else on it. The one use of it is an all-gather on a stream of its own; it
// is neither kept nor aborted. Blocks the host until all ranks are there, at most for `timeout` if the communicator
// does not block. Calls `look`, which may throw, every 100 ms meanwhile. Throws ArgumentError on a null pointer,
// TransportError and TimeoutError.
NcclBootstrap bootstrap_over_nccl(void* communicator, std::uint64_t token, std::chrono::milliseconds timeout,
                                  const std::function<void()>& look);

struct NcclOptions {
  NcclUniqueId unique_id{};
  int rank = 0;
  int size = 1;
  // Ranks to connect with at the start, as Topology::peers() has them; both sides must name each other. Empty: all.
  std::vector<int> peers;
  // What all ranks must have alike, in words: they compare it as they connect.
  std::string agreement;
  std::chrono::milliseconds connect_timeout{600'000};
  // Called every 100 ms by a thread that connects, or waits for NCCL to start a transfer. Returns why it is to stop, or
  // an empty string. May throw, which ends the connection, too. May be empty.
  std::function<std::string()> interruption;
  // Called once, by any thread, with the reason of a failure. May be empty. It and `peer_failure` run on a separate
  // thread, perhaps beyond the transport's lifetime, so they must own what they use. They delay an abort only if
  // `on_undefined_bytes` precedes it, by 3 s at most.
  std::function<void(const std::string& reason)> on_failure;
  // Called by the watchdog after `on_failure` and before the abort, if the watchdog found the failure: from the abort
  // on, streams use undefined bytes of calls that had returned. May end the process. May be empty.
  std::function<void(const std::string& reason)> on_undefined_bytes;
  // Called regularly while ranks connect, and by the watchdog during transfers. Returns a peer's reason of failure, or
  // an empty string. May be empty.
  std::function<std::string()> peer_failure;
};

// Connects this rank, on the current CUDA device, with its peers. Called by all ranks. Throws TransportError or
// TimeoutError, also during graph capture. Later calls never wait for a peer on the host, but for the first ones with
// others: NCCL connects those ranks then.
//
// Transfers run on one communicator and one stream of the transport, behind the work queued on the caller's stream. A
// group (see begin_group) is one NCCL group, that is, one kernel. begin() has one of its own where the words are new
// and the stream captures no graph: ranks that connected at the start exchange the words, and the watchdog compares
// them. So all ranks capture the first call of its words, or none. Calls of two ranks of more, as messages, have none.
// Other calls that differ time out, and the message names this rank's call; if sizes are equal, nothing tells.
//
// A watchdog thread polls NCCL for errors and transfers for their deadline. On either it calls `on_failure` and aborts
// the communicator: streams go on, with undefined bytes, and every later call throws. Transfers captured in a CUDA
// graph have no deadline; errors of NCCL and of peers end them, too.
//
// NCCL's abort returns only when no graph with a captured transfer is left. It runs on a separate thread. The
// transport's destructor waits for it for at most 10 s, then leaves the communicator to that thread.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

}  // namespace zcomm
