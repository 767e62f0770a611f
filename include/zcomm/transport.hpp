// Transports: bytes <-> ranks. A transport knows nothing of dtypes or formats.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zcomm/stream.hpp"

namespace zcomm {

// Returns when a timeout that begins now is over. One that the clock cannot count never is.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto now = Clock::now();
  const auto longest = std::chrono::floor<std::chrono::milliseconds>(Clock::time_point::max() - now);
  return timeout < longest ? now + timeout : Clock::time_point::max();
}

struct Send {
  int peer = 0;
  const std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  bool has_upper_bound = false;  // the receiver knows only a limit of the size: see Recv::is_upper_bound
  // Elements that the receiver must expect, where only the two of them know the length: wires of several lengths have
  // as many bytes. NCCL does not compare it.
  std::int64_t num_elements = 0;
};

struct Recv {
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  bool is_upper_bound = false;  // accepts fewer bytes, unless Transport::is_stream_ordered()
  // If not null, the bytes may stay in memory of the transport until the transfer is destroyed. Each wait() of the rank
  // may point this at another place where they are. It must point at `data` first, and some transports leave it there.
  const std::byte** place = nullptr;
  std::int64_t num_elements = 0;  // as Send has it
};

// Transfer in progress. Its memory must stay valid until wait() has returned (on a GPU: until the stream has passed
// it). Destroying it before wait() cancels it: its memory is not touched afterwards, and the peers of its messages
// fail. It must not outlive its transport.
class [[gnu::visibility("default")]] Transfer {
 public:
  virtual ~Transfer() = default;
  // Completes the transfer: blocks on a CPU; on a GPU makes `stream` wait and returns at once. Called once. Throws
  // TransportError or TimeoutError.
  virtual void wait(StreamView stream) = 0;
};

// Result of a check of received bytes: a description of the error, an empty string if they are right, or nullopt while
// unknown. Never blocks.
using DeferredCheck = std::function<std::optional<std::string>()>;

class [[gnu::visibility("default")]] Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Begins a collective on `stream`. `call` describes it in words and must be equal on all peers that exchange bytes in
  // it. A transport that can compare the words cheaply does so: here, or in a later call, it throws TransportError that
  // quotes both. All transfers up to the next begin() share one `timeout`.
  virtual void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                     StreamView stream = {}) = 0;

  // Starts one group of messages with any peers, after the work queued on `stream`. Ranks that exchange bytes make the
  // same sequence of start() calls; messages between two ranks match in order. Zero-byte messages are skipped. A rank
  // does not send to itself. Throws TransportError, here or in wait(), if both sides differ on a size or a message
  // exceeds a limit.
  virtual std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                          StreamView stream) = 0;

  // Gathers size() slots of slot_bytes; the caller fills its own slot. The default calls start() with every peer;
  // transports with a faster way override it.
  virtual std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream);

  // Groups the transfers started between these two calls. A transport may launch them together when the group ends,
  // behind the work then on `stream`; they cannot be waited for before. Ranks make the same groups. The default starts
  // every transfer at once.
  virtual void begin_group() {}
  virtual void end_group(StreamView) {}
  // Tells whether transfers are work on a GPU's stream. Then they start in groups, the host must know the size of every
  // message (see Recv::is_upper_bound), and ranks compare a call only when its words are new. Elsewhere many small
  // transfers cost no more than a large one.
  virtual bool is_stream_ordered() const { return false; }

  // Throws if an earlier transfer has failed meanwhile, or what was compared or watched was wrong. On a CPU wait()
  // throws instead.
  virtual void check() {}
  // Watches received bytes: throws TransportError if `finding` is an error. On a GPU, whose calls return before their
  // bytes arrive, returns at once, and polls `finding` until its result is known. An error then fails this rank like a
  // failed transfer. `finding` may be destroyed in a later call.
  virtual void watch(DeferredCheck finding);

  // Waits for transfers that are under way on a GPU, at most for their timeouts. abort() ends it.
  virtual void finish() noexcept {}
  // Makes every pending and future call on this rank throw, and sends `reason` to the peers if possible. Thread-safe.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Makes one transport per rank, for ranks that are threads of this process. They share state; each must be used by one
// thread at a time, and may outlive the others.
std::vector<std::unique_ptr<Transport>> make_local_transports(int size);

}  // namespace zcomm
