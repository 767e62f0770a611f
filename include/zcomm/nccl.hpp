// NCCL as a transport. It is opened at run time, never linked; in a build without CUDA all of this throws Error that
// says so.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "zcomm/transport.hpp"

namespace zcomm {

struct NcclLibrary {
  std::string path;
  int version = 0;  // as ncclGetVersion: 22809 is 2.28.9
};

// Opens NCCL once per process, in this order: the file that ZCOMM_NCCL_LIB names, the copy that the process already
// has, `wheel_path` if it is not empty (nvidia/nccl/lib/libnccl.so.2 of the installed wheel), the soname libnccl.so.2.
// A second copy is never mapped beside one that is there. Later calls return the first one's result. Throws
// TransportError that lists what was tried, or names the missing symbol and the file.
const NcclLibrary& load_nccl(const std::string& wheel_path = {});

using NcclUniqueId = std::array<std::byte, 128>;

// Names a group of ranks: made by one of them, handed to the others by the caller.
NcclUniqueId make_nccl_unique_id();

struct NcclOptions {
  NcclUniqueId unique_id{};
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds connect_timeout{600'000};
  // Called once, by any thread, with what went wrong, before the communicators are aborted. May be empty.
  std::function<void(const std::string& reason)> on_failure;
  // Asked now and then by the watchdog while transfers are under way: what a peer says went wrong there, or nothing.
  // May be empty.
  std::function<std::string()> peer_failure;
};

// Connects this rank, on the current CUDA device, with the other size-1; all of them call it. Throws TransportError or
// TimeoutError, also while a graph is captured.
//
// Transfers run on streams of the transport's own, behind the work queued on the caller's, in turn on two communicators
// so that the hops of two chunks can be under way at once. begin() compares nothing (that would cost a message and a
// synchronization): ranks that call different things run into the timeout, whose message says what this rank called.
// A watchdog thread polls NCCL for errors and transfers for their deadline; on either it calls `on_failure` and aborts
// the communicators, so that streams go on (with undefined bytes) and every later call throws. Transfers that a CUDA
// graph captured are not watched.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

}  // namespace zcomm
