// NCCL as a transport. NCCL is opened at run time, never linked. In a build without CUDA, all functions throw Error
// that says so.
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

// Oldest supported version of NCCL. Earlier releases hang or crash when non-blocking communicators are aborted.
inline constexpr int kMinNcclVersion = 22703;  // 2.27.3

// Opens NCCL once per process. Returns the path and the version of that library in all calls; 22809 is 2.28.9.
//
// The environment variable ZCOMM_NCCL_LIB names the file, if it is set. Otherwise the call uses the copy that the
// process has mapped. Otherwise it tries `wheel_path` (nvidia/nccl/lib/libnccl.so.2 of the installed wheel) unless that
// is empty, then the soname libnccl.so.2. It never maps a second copy next to a mapped one.
//
// Throws TransportError if no library can be opened, or if ZCOMM_NCCL_LIB names another file than the mapped one. It
// also throws it if the library lacks a symbol or is too old. The message names the file or what was tried. A call
// after a failure tries again.
std::pair<std::string, int> load_nccl(const std::string& wheel_path = {});

// Identifier of a group of ranks, an ncclUniqueId.
using NcclUniqueId = std::array<std::byte, 128>;

// Makes the identifier of a new group. One rank makes it, and the caller distributes it to the others.
// Opens NCCL, and throws what load_nccl() throws.
NcclUniqueId make_nccl_unique_id();

// Result of bootstrap_over_nccl(): what a rank needs to connect a group over the same ranks.
struct NcclBootstrap {
  int rank = 0;                       // of the communicator
  int device = 0;                     // CUDA device of the communicator
  NcclUniqueId unique_id{};           // of the new group, made by rank 0; zero without `makes_id`
  std::vector<std::uint64_t> tokens;  // of all ranks, in rank order
  std::shared_ptr<void> memory;       // that the exchange used: freeing it waits for all work of the device
};

// Exchanges a `token` of each rank and, with `makes_id`, a new unique identifier, over a communicator that the caller
// owns. NCCL keeps a thread and a socket for an identifier until a group is connected with it.
//
// `communicator` is an ncclComm_t. All of its ranks must make this call, and nothing else on it in the meantime.
// The call makes one all-gather on a new stream. It neither keeps nor aborts the communicator.
// It blocks the host until all ranks have come, at most for `timeout` if the communicator is non-blocking.
// It calls `look` every 100 ms while it waits. `look` must not be empty; what it throws ends the wait.
//
// Throws ArgumentError on a null pointer, TransportError on a failure of NCCL, TimeoutError, and Error on a failure of
// CUDA.
NcclBootstrap bootstrap_over_nccl(void* communicator, std::uint64_t token, std::chrono::milliseconds timeout,
                                  const std::function<void()>& look, bool makes_id = true);

// Options of make_nccl_transport(). Every function may be empty.
//
// `on_failure` and `peer_failure` run on separate threads, perhaps after the transport is destroyed, so they must own
// what they use.
struct NcclOptions {
  NcclUniqueId unique_id{};  // the same on all ranks
  int rank = 0;              // from 0 to size - 1
  int size = 1;

  // Ranks to connect with at the start, usually Topology::peers(). Two ranks must name each other. Empty: all ranks.
  std::vector<int> peers;

  // Node of each rank, as Topology takes them; the same on all ranks. Empty: all ranks are in one node.
  // In a group of several nodes, the ranks of each node have a second communicator. NCCL gives all pairs of the group's
  // communicator the few channels that its network needs, over NVLink, too.
  std::vector<int> node_ids;

  // Text that must be equal on all ranks. Peers compare it while they connect, and a mismatch is a TransportError.
  std::string agreement;

  // Limit of the time to connect.
  std::chrono::milliseconds connect_timeout{600'000};

  // Interrupts a thread that connects, or that waits for NCCL to start a transfer. That thread calls it every 100 ms.
  // It returns the reason to stop, or an empty string. If it throws, the wait ends with that exception.
  std::function<std::string()> interruption;

  // Receives the reason of a failure. It is called once.
  // If `on_undefined_bytes` is set and precedes the abort, this delays it, with `peer_failure` by 3 s at most.
  std::function<void(const std::string& reason)> on_failure;

  // Runs after `on_failure` and before the abort, if the watchdog found the failure. It may end the process.
  // From the abort on, streams use undefined bytes of calls that had returned.
  std::function<void(const std::string& reason)> on_undefined_bytes;

  // Runs once if a call of CUDA or NCCL keeps the watchdog for as long as `heartbeat`; 0: not. Its text names both
  // calls. It may end the process: who waits for the same lock of CUDA would never return.
  std::function<void(const std::string& reason)> on_stuck;
  std::chrono::seconds heartbeat{480};

  // Returns the reason why a peer has failed, or an empty string.
  // It is called regularly while ranks connect and, beside the watchdog, during transfers.
  std::function<std::string()> peer_failure;
};

// Connects this rank, on the current CUDA device, with its peers. All ranks must make this call.
//
// Blocks the host until `peers` are connected, at most for `connect_timeout`. Throws ArgumentError on a rank outside
// [0, size), TimeoutError if not all ranks come, and TransportError on any other failure.
// A call during a graph capture is such a failure, and so is NCCL_COMM_BLOCKING other than 0 in the environment.
// A later call never waits for a peer on the host, except for the first one with a rank outside `peers`: NCCL connects
// the two ranks then.
//
// Transfers run on streams of the transport, after the work queued on the caller's stream: on one between nodes, on
// another inside the node. A group (see Transport::begin_group) is one NCCL group. It is one kernel of NCCL, or two
// side by side, if it has messages to other nodes and to the same one. So a GPU needs room for two, of at most 16
// multiprocessors each before Blackwell.
//
// begin() launches an extra group to compare call signatures the first time it sees one, unless the stream is being
// captured. So either all ranks or none may capture the first call with a signature.
// Point-to-point calls are not compared. More exactly, no call is in which this rank has one peer in a group of more
// than two ranks. Neither are calls between ranks that did not connect at the start. Such calls time out if they
// differ, with a message that names this rank's call, or go unnoticed if their sizes are equal.
//
// A watchdog thread polls NCCL for errors, and transfers for their deadline. On either it calls `on_failure` and aborts
// the communicator. Streams then continue with undefined bytes, and every later call throws.
// Transfers that a CUDA graph captured have no deadline. Errors of NCCL and of peers end them, too.
//
// NCCL's abort returns only when no graph with a captured transfer is left, so it runs on a separate thread.
// The destructor waits at most 10 s for it, then leaves the communicator to that thread.
//
// Example, for one process per GPU:
//   const CudaDeviceGuard guard(device);
//   NcclOptions options;
//   options.unique_id = unique_id;  // make_nccl_unique_id() of one rank, sent to all
//   options.rank = rank;
//   options.size = topology.size();
//   options.peers = topology.peers(rank);
//   auto workspace = make_cuda_workspace();
//   auto codec = make_cuda_codec(*workspace);
//   Communicator communicator(make_nccl_transport(options), topology, std::move(codec), std::move(workspace),
//                             kDefaultGpuChunkBytes);
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

}  // namespace zcomm
