// One NCCL communicator and the stream that its transfers run on.
#pragma once

#include <atomic>
#include <chrono>
#include <span>

#include "cuda/check.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/transport.hpp"

namespace zcomm {

// Until when a call into NCCL is given time to finish.
struct Patience {
  std::chrono::steady_clock::time_point deadline;
  const std::atomic<bool>& give_up;
};

// Not thread-safe: one thread at a time may be inside a communicator. All is non-blocking: calls that NCCL goes on with
// in the background are polled, and leave soon, with TransportError or TimeoutError, once `patience` is over.
class NcclLane {
 public:
  explicit NcclLane(const nccl::Symbols& symbols);
  ~NcclLane();  // the communicator must have been closed, aborted or forgotten
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  // Throws while this thread, or the whole process, captures a graph: NCCL connects with calls that captures forbid.
  void check_not_capturing() const;
  void connect(const NcclOptions& options, const Patience& patience);
  // A second communicator of the same ranks.
  void connect_beside(NcclLane& first, int rank, const Patience& patience);

  cudaStream_t stream() const { return stream_; }

  // What this lane does next comes after the work queued on `stream`. That is all the order that a transfer needs:
  // whoever reads what an earlier transfer received, or writes what it sent, does so on the caller's stream after
  // Transfer::wait, so a buffer that is used again by a later chunk is free once that stream gets here.
  void follow(cudaStream_t stream);

  // Start as one group; on return it is queued on stream().
  void exchange(std::span<const Send> sends, std::span<const Recv> recvs, const Patience& patience);
  void all_gather(std::byte* slots, std::size_t slot_bytes, int rank, const Patience& patience);

  // Throws if NCCL met an error since the last call.
  void check_health() const;

  // Ends the communicator when its work is done. False if that is not so in time: then it is still there.
  bool close(const Patience& patience) noexcept;
  void abort() noexcept;
  // Leaves the communicator alive for good.
  void forget() noexcept { communicator_ = nullptr; }

 private:
  template <class Calls>
  void run_group(const Patience& patience, Calls&& calls);
  void check(nccl::Result result, const char* what) const;
  void settle(nccl::Comm communicator, const char* what, const Patience& patience) const;
  void fail(nccl::Result result, const char* what, nccl::Comm communicator) const;

  const nccl::Symbols& symbols_;
  nccl::Comm communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t caller_ = nullptr;
};

}  // namespace zcomm
