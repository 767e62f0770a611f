// One NCCL communicator and the stream that its groups run on.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/check.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/transport.hpp"

namespace zcomm {

// Until when a call into NCCL is given time to finish.
struct Patience {
  std::chrono::steady_clock::time_point deadline;
  const std::atomic<bool>& give_up;
};

// What one NCCL group moves.
struct NcclMessages {
  struct Gather {
    std::byte* slots;
    std::size_t slot_bytes;
  };
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<Gather> gathers;
};

// One thread at a time may be inside NCCL, whose holder of mutex() it is: all but mutex(), stream(), follow() and
// abort() need it. All but abort() is non-blocking: calls that NCCL goes on with in the background are polled, and
// leave soon, with TransportError or TimeoutError, once `patience` is over. So the mutex is never held for long.
class NcclCommunicator {
 public:
  explicit NcclCommunicator(const nccl::Symbols& symbols);
  ~NcclCommunicator();  // it must have been closed, aborted or forgotten
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Throws while this thread, or the whole process, captures a graph: NCCL connects with calls that captures forbid.
  void check_not_capturing() const;
  // With all ranks, and then with `peers`, whom a group can then reach without waiting for them. With all other ranks
  // as peers, gathers are connected, too. Blocks.
  void connect(const NcclOptions& options, std::span<const int> peers, const Patience& patience);

  std::mutex& mutex() { return mutex_; }
  cudaStream_t stream() const { return stream_; }

  // What comes next comes after the work queued on `stream`. That is all the order that a transfer needs: whoever reads
  // what an earlier transfer received, or writes what it sent, does so on the caller's stream after Transfer::wait, so
  // a buffer that is used again by a later chunk is free once that stream gets here.
  void follow(cudaStream_t stream);

  // Starts a group; on return it is queued on stream().
  void run(const NcclMessages& messages, const Patience& patience);

  // Throws if NCCL met an error since the last call.
  void check_health() const;

  // Ends the communicator when its work is done. False if that is not so in time: then it is still there.
  bool close(const Patience& patience) noexcept;
  // Returns when all that was put on the stream is gone, and every graph that captured it: perhaps never. The work
  // itself ends at once. Takes the mutex, but not while it waits: whoever has the mutex afterwards must not use the
  // communicator any more, but for close(), which has nothing left to do.
  void abort() noexcept;
  // Leaves the communicator alive for good.
  void forget() noexcept { communicator_ = nullptr; }

 private:
  void connect_peers(std::span<const int> peers, const Patience& patience);
  void check(nccl::Result result, const char* what) const;
  void settle(const char* what, const Patience& patience) const;
  [[noreturn]] void fail(nccl::Result result, const char* what) const;

  const nccl::Symbols& symbols_;
  std::mutex mutex_;
  nccl::Comm communicator_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t caller_ = nullptr;
};

}  // namespace zcomm
