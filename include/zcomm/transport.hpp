// Transports: they move bytes between ranks, and know nothing of dtypes or formats.
//
// A program makes a transport and gives it to a Communicator, which makes all calls but abort(). The classes are here
// for those that write a transport: CONTRIBUTING.md has the steps.
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

class Transport;

// Makes one transport per rank, for `size` ranks that are threads of this process, in host memory.
// They share state. Each must be used by one thread at a time, and may outlive the others.
// begin() blocks until all peers make the call, and compares the calls. start() copies what it can at once.
// Throws ArgumentError if `size` is less than 1.
std::vector<std::unique_ptr<Transport>> make_local_transports(int size);

// --- Internal: the interface between collectives and transports. A caller needs nothing below.

// Returns the time at which a timeout that begins now expires.
// A timeout that is too long for the clock never expires: the result is the clock's maximum.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto now = Clock::now();
  const auto longest = std::chrono::floor<std::chrono::milliseconds>(Clock::time_point::max() - now);
  return timeout < longest ? now + timeout : Clock::time_point::max();
}

// Message to another rank. The memory is borrowed until Transfer::wait().
struct Send {
  int peer = 0;  // the receiver; not this rank
  const std::byte* data = nullptr;
  std::size_t num_bytes = 0;     // a message of 0 bytes is skipped
  bool has_upper_bound = false;  // the receiver knows only a limit of the size: see Recv::is_upper_bound
  // Elements that the receiver must expect, where only the two ranks know the length; 0 elsewhere.
  // It is compared because wires of several lengths have the same number of bytes. NCCL does not compare it.
  std::int64_t num_elements = 0;
};

// Message from another rank. The memory is borrowed until Transfer::wait().
struct Recv {
  int peer = 0;  // the sender; not this rank
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;    // must equal the sender's, or be at least as large with `is_upper_bound`
  bool is_upper_bound = false;  // accepts fewer bytes; not supported if Transport::is_stream_ordered()
  // If not null, the bytes may stay in memory of the transport until the transfer is destroyed.
  // It must point at `data` first. Every wait() of the rank may point it at another place where the bytes are.
  // Some transports leave it at `data`.
  const std::byte** place = nullptr;
  std::int64_t num_elements = 0;  // as in Send
};

// Transfer in progress.
//
// Its memory must stay valid until wait() has returned, or on a GPU until the stream has passed the wait.
// Destroying it before wait() cancels it: its memory is not touched afterwards, and the peers of its messages fail.
// It must not outlive its transport.
class [[gnu::visibility("default")]] Transfer {
 public:
  virtual ~Transfer() = default;

  // Completes the transfer. Blocks the host on a CPU; makes `stream` wait and returns at once on a GPU.
  // Must be called at most once. Throws TransportError or TimeoutError.
  virtual void wait(StreamView stream) = 0;
};

// Check of received bytes, which never blocks.
// It returns a description of the error, an empty string if the bytes are right, or nullopt while that is unknown.
using DeferredCheck = std::function<std::optional<std::string>()>;

// Streams beside a call's own. Kernels of one step of a pipeline run on them side by side. One thread may use them.
class [[gnu::visibility("default")]] Lanes {
 public:
  virtual ~Lanes() = default;

  // Returns a lane whose later work follows what is queued on `stream` now, beside the work of other lanes.
  virtual StreamView fork(StreamView stream) = 0;

  // Makes `stream` wait for the work on all lanes.
  virtual void join(StreamView stream) = 0;
};

// Connections of one rank to all others of a group. One thread at a time may use it, except for abort().
class [[gnu::visibility("default")]] Transport {
 public:
  virtual ~Transport() = default;

  // Returns this rank, from 0.
  virtual int rank() const = 0;

  // Returns the number of ranks.
  virtual int size() const = 0;

  // Begins a collective on `stream`.
  // `call` describes it in words, and must be equal on all ranks that exchange bytes in it.
  // `peers` are the ranks that compare the call, without this one. If A names B, B names A.
  // A transport that can compare the words cheaply does so. It throws TransportError that quotes both calls if they
  // differ, here or in a later call.
  // All transfers up to the next begin() share one `timeout`, which starts now.
  virtual void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                     StreamView stream = {}) = 0;

  // Starts messages with any peers, after the work that is queued on `stream`. Does not wait for a peer.
  // Messages between two ranks match in order, so these ranks must make the same sequence of start() calls.
  // Zero-byte messages are skipped. A rank must not send to itself.
  // The spans are read before the call returns.
  // Throws TransportError, here or in wait(), on a size mismatch, or if a message exceeds a limit.
  // NCCL does not detect a size mismatch; the transfers of such a call time out.
  virtual std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                          StreamView stream) = 0;

  // Gathers size() contiguous slots of `slot_bytes` bytes each, in rank order. The caller fills its own slot first.
  // The default calls start() with every peer. Transports with a faster way override it.
  virtual std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream);

  // Opens a group: a transport may delay the transfers that start until end_group().
  // Ranks must make the same groups. The default does nothing, and every transfer starts at once.
  virtual void begin_group() {}

  // Launches the transfers of the group together, after the work that is queued on `stream` now.
  // No transfer of the group may be waited for earlier.
  virtual void end_group(StreamView) {}

  // Returns true if transfers are work on a GPU's stream.
  // Transfers then start in groups, and ranks compare a call only when its words are new.
  // The host must then know the size of every message: see Recv::is_upper_bound.
  // Other transports start a transfer at once, and many small transfers cost no more than a large one.
  virtual bool is_stream_ordered() const { return false; }

  // Returns the lanes of this rank's device, which live as long as the transport; null if there are none.
  virtual Lanes* lanes() { return nullptr; }

  // Throws ArgumentError if transfers belong to a CUDA graph that is being captured, and `stream` does not.
  virtual void check_stream(StreamView) const {}

  // Throws if an earlier transfer has failed in the meantime, or if a comparison or a watch() has found an error.
  // Never blocks. The default does nothing, because wait() throws on a CPU.
  virtual void check() {}

  // Watches received bytes.
  // The default calls `finding` once, and throws TransportError if it returns an error.
  // A stream-ordered transport returns at once, and polls `finding` until its result is known. An error then fails this
  // rank as a failed transfer does. It may destroy `finding` in a later call.
  virtual void watch(DeferredCheck finding);

  // Blocks the host until the transfers in progress on a GPU have completed, at most for their timeouts.
  // abort() ends the wait. The default does nothing.
  virtual void finish() noexcept {}

  // Makes every pending and future call on this rank throw. Sends `reason` to the peers if possible. Thread-safe.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace zcomm
