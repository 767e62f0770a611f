// Bytes <-> ranks. A transport knows nothing of dtypes or formats.
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

struct Send {
  int peer = 0;
  const std::byte* data = nullptr;
  std::size_t num_bytes = 0;
};

struct Recv {
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  bool is_limit = false;  // fewer bytes may be sent. In host memory only: NCCL must know sizes.
};

// Bytes in flight. Their memory must stay valid until wait() has returned (on a GPU: until the stream has passed it).
// Destroying one that was not waited for gives it up: its memory is not touched afterwards, and the peers that it moves
// bytes with fail. It must not outlive its transport.
class [[gnu::visibility("default")]] Transfer {
 public:
  virtual ~Transfer() = default;
  // On a CPU blocks until all has been sent and received; on a GPU makes `stream` wait and returns at once. Called
  // once. Throws TransportError or TimeoutError.
  virtual void wait(StreamView stream) = 0;
};

// What a device has found wrong with bytes that had arrived, in words; empty if they are right, nothing while it is not
// known. Never blocks.
using Finding = std::function<std::optional<std::string>()>;

class [[gnu::visibility("default")]] Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Opens a collective: `call` says in words what this rank is about to do, and must read the same on every peer that
  // it then exchanges bytes with. A transport that can compare cheaply does so and throws TransportError that quotes
  // both. All transfers up to the next begin() share one `timeout`.
  virtual void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout) = 0;

  // Moves any set of byte ranges between any set of peers as one group, after the work queued on `stream`. Ranks that
  // exchange bytes make the same sequence of start() calls; messages between two ranks match in order. Zero-byte
  // messages are skipped. A rank does not send to itself. Two sides that disagree on a size, or a message beyond a
  // limit, throw TransportError, here or in wait().
  virtual std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                          StreamView stream) = 0;

  // Gathers size() slots of slot_bytes; the own slot is filled by the caller. Here it is start() with every peer;
  // a transport that has something better overrides it.
  virtual std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream);

  // Transfers that are started between these two may go out together, when the group ends, behind the work that is on
  // `stream` then; those that do cannot be waited for before. Ranks make the same groups. Here every transfer goes out
  // at once.
  virtual void begin_group() {}
  virtual void end_group(StreamView) {}
  // True if that is so: then many small transfers cost no more than a large one.
  virtual bool starts_at_once() const { return true; }

  // Throws if a transfer that was started before has failed since. On a CPU wait() does.
  virtual void check() {}
  // Of a transport to GPUs, whose calls return before their bytes are there: `finding` is asked now and then until it
  // is known. If something is wrong, this rank fails as if a transfer had. It may be destroyed in a later call.
  virtual void watch(Finding finding);

  // Makes every pending and future call on this rank throw, and tells the peers `reason` as well as it can. Any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// One transport per rank of a group whose ranks are threads of this process. They share their state; each must be used
// by one thread at a time, and may outlive the others.
std::vector<std::unique_ptr<Transport>> make_local_transports(int size);

}  // namespace zcomm
