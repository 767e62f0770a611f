// NCCL as a transport. It is opened at run time, never linked; in a build without CUDA all of this throws Error that
// says so.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zcomm/transport.hpp"

namespace zcomm {

struct NcclLibrary {
  std::string path;
  int version = 0;  // as ncclGetVersion: 22809 is 2.28.9
};

// Older releases hang or crash where communicators do not block and are aborted.
inline constexpr int kMinNcclVersion = 22703;  // 2.27.3

// Opens NCCL once per process, in this order: the file that ZCOMM_NCCL_LIB names, the copy that the process already
// has, `wheel_path` if it is not empty (nvidia/nccl/lib/libnccl.so.2 of the installed wheel), the soname libnccl.so.2.
// A second copy is never mapped beside one that is there. Later calls return the first one's result. Throws
// TransportError that lists what was tried, names the missing symbol and the file, or the version that is too old.
const NcclLibrary& load_nccl(const std::string& wheel_path = {});

using NcclUniqueId = std::array<std::byte, 128>;

// Names a group of ranks: made by one of them, handed to the others by the caller.
NcclUniqueId make_nccl_unique_id();

struct NcclOptions {
  NcclUniqueId unique_id{};
  int rank = 0;
  int size = 1;
  // Ranks that this one exchanges bytes with; the same pairs on both sides. Empty: all of them.
  std::vector<int> peers;
  // At most so many of the GPU's multiprocessors for a transfer, and memory for as many channels to each peer. 0: what
  // NCCL takes.
  int max_ctas = 0;
  std::chrono::milliseconds connect_timeout{600'000};
  // Called once, by any thread, with what went wrong, while the communicator is being aborted. May be empty. Neither
  // this nor `peer_failure` holds up an abort: if they take long, they go on on a thread of their own, also after the
  // transport has gone, so they must own what they use.
  std::function<void(const std::string& reason)> on_failure;
  // Called by the watchdog, after `on_failure`, if it was the one to find a failure: calls that have returned already
  // gave their callers undefined bytes. May end the process. May be empty.
  std::function<void(const std::string& reason)> on_undefined_bytes;
  // Asked now and then by the watchdog while transfers are under way: what a peer says went wrong there, or nothing.
  // May be empty.
  std::function<std::string()> peer_failure;
};

// Connects this rank, on the current CUDA device, with the other size-1, and all pairs of peers; all ranks call it.
// Throws TransportError or TimeoutError, also while a graph is captured. Later calls wait for no peer on the host.
//
// Transfers run on one communicator and one stream of the transport's own, behind the work queued on the caller's: all
// that a group holds (see begin_group) is one NCCL group, that is, one kernel. begin() compares nothing (that would
// cost a message and a synchronization): ranks that call different things run into the timeout, whose message says what
// this rank called. A watchdog thread polls NCCL for errors and transfers for their deadline; on either it aborts the
// communicator and calls `on_failure`, so that streams go on (with undefined bytes) and every later call throws.
// Transfers that a CUDA graph captured have no deadline; errors of NCCL and of peers end them, too.
//
// NCCL's abort returns when no graph that captured a transfer is left. It runs on a thread of its own; whoever destroys
// the transport waits 10 s for it at most, and leaves the communicator to that thread then.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

}  // namespace zcomm
