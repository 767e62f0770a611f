// NCCL communicator and the stream that its groups run on.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cuda/owned.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/transport.hpp"

namespace zcomm {

// Called often while NCCL is waited for. Throws if the wait for it to `what` is over.
using Patience = std::function<void(const char* what)>;

// Messages of one NCCL group.
struct NcclMessages {
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  std::vector<std::span<std::byte>> gathers;  // slots of all ranks
};

// Memory in which ranks exchange what they are to have alike, in words: one slot for each rank.
class NcclTexts {
 public:
  NcclTexts(int rank, int size) : rank_(rank), host_(offset(size)) {}

  // Copies this rank's words to the device, behind the work on `stream`; the second function, all words to the host.
  void put(const std::string& words, cudaStream_t stream);
  void fetch(cudaStream_t stream);
  bool are_fetched() const { return fetched_.is_over("compare calls"); }
  // Returns the messages to send in between: with these peers, or a gather of all ranks.
  NcclMessages messages(std::span<const int> peers) const;
  NcclMessages gather() const { return {{}, {}, {{device_.data(), device_.size()}}}; }
  // Returns the text of a TransportError about the first of these peers that has other words, or an empty string.
  std::string difference(std::span<const int> peers) const;

  std::atomic<bool> is_used = true;

 private:
  static std::size_t offset(int rank) { return static_cast<std::size_t>(rank) * sizeof(CallText); }
  CallText on_host(int rank) const;

  int rank_;
  PinnedBytes host_;
  DeviceBytes device_{host_.size()};  // freed before: that waits for copies
  Event fetched_;
};

// NCCL communicator, for one thread inside NCCL at a time. The caller holds mutex(), except for mutex(), stream(),
// texts(), follow() and abort(). All calls except abort() are non-blocking in NCCL: they poll what NCCL does in the
// background and throw soon after `patience` ends. So the mutex is never held for long.
class NcclCommunicator {
 public:
  NcclCommunicator();
  ~NcclCommunicator();  // requires close(), abort() or forget() before
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Throws while this thread, or the whole process, captures a graph: NCCL connects with calls that captures forbid.
  void check_not_capturing() const;
  // Meets all ranks, then connects with `peers`, so that later groups do not wait for these. If `peers` are all other
  // ranks, gathers are connected, too. Blocks.
  void connect(const NcclOptions& options, std::span<const int> peers, const Patience& patience);

  std::mutex& mutex() { return mutex_; }
  cudaStream_t stream() const { return stream_; }
  // Returns memory that is not used, and marks it as used. It lives as long as this object, because freeing it waits
  // for the device.
  NcclTexts& texts();

  // Orders stream() behind the work queued on `stream`. Transfers need no other order: callers touch buffers of earlier
  // transfers only on their own stream, after Transfer::wait. So a buffer that a later chunk reuses is free by then.
  void follow(StreamView stream);

  // Starts a group; on return it is queued on stream(). Throws TransportError if the thread has a group open, and
  // leaves the communicator open for good.
  void run(const NcclMessages& messages, const Patience& patience);

  // Throws if NCCL reported an error since the last call.
  void check_health() const;

  // Ends the communicator when its work is done. Returns false, with the communicator still open, if that is not in
  // time.
  bool close(const Patience& patience) noexcept;
  // Aborts all work at once. Returns when everything queued on the stream and every graph that captured it is gone,
  // which may be never. Takes the mutex, but not while it waits. Later holders of the mutex may only call close(),
  // which then does nothing.
  void abort() noexcept;
  // Leaves the communicator open for good.
  void forget() noexcept { communicator_ = nullptr; }

 private:
  void connect_peers(std::span<const int> peers, const std::string& agreement, const Patience& patience);
  void check(nccl::Result result, const char* what) const;
  void settle(const char* what, const Patience& patience) const;
  [[noreturn]] void fail(nccl::Result result, const char* what) const;

  const nccl::Library& nccl_ = nccl::library();
  std::mutex mutex_;
  nccl::Comm communicator_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  cudaStream_t stream_ = nullptr;
  Event caller_;
  std::vector<std::unique_ptr<NcclTexts>> texts_;
};

}  // namespace zcomm
