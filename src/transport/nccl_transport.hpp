// An NCCL communicator with the stream of its groups, transfers over it, and the watchdog that aborts failed ones.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "cuda/lanes.hpp"
#include "cuda/owned.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/call_check.hpp"

namespace zcomm {

// Called often while NCCL is waited for. Throws if the wait for it to `what` is over.
using WaitGuard = std::function<void(const char* what)>;

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

// Communicator of the ranks of this node: see NcclOptions::node_ids.
struct NodeCommunicator {
  // NCCL writes it while the group's communicator is in progress.
  nccl::Comm load() { return std::atomic_ref(communicator).load(); }

  nccl::Comm communicator = nullptr;
  CudaStream stream;
  std::vector<int> ranks;  // in it, of each rank of the group; -1: on another node
  Event begin;
  Event end;
};

// NCCL communicator, for one thread inside NCCL at a time. The caller holds mutex(), except for mutex(), stream(),
// texts(), abort(), and what orders streams: CUDA blocks the host where a launch queue is full. All calls except
// abort() are non-blocking in NCCL: they poll what NCCL does in the background and throw soon after `patience` ends. So
// the mutex is never held for long. Before it is destroyed, it needs close(), abort() or forget().
class NcclCommunicator {
 public:
  // Throws while this thread, or the whole process, captures a graph: NCCL connects with calls that captures forbid.
  void check_not_capturing() const;
  // Meets all ranks, then connects with `peers`, so that later groups do not wait for these. If `peers` are all other
  // ranks, gathers are connected, too. Blocks.
  void connect(const NcclOptions& options, std::span<const int> peers, const WaitGuard& patience);

  std::mutex& mutex() { return mutex_; }
  cudaStream_t stream() const { return stream_.get(); }
  // Returns memory that is not used, and marks it as used. It lives as long as this object, because freeing it waits
  // for the device.
  NcclTexts& texts();

  // Orders stream() behind the work queued on `stream`. Transfers need no other order: callers touch buffers of earlier
  // transfers only on their own stream, after Transfer::wait. So a buffer that a later chunk reuses is free by then.
  void follow(StreamView stream);

  // Order the node's stream behind stream() before a group of these messages, and stream() behind it afterwards.
  void fork(const NcclMessages& messages);
  void join(const NcclMessages& messages);

  // Starts a group; on return it is queued on its streams. Throws TransportError if the thread has a group open, and
  // leaves the communicator open for good.
  void run(const NcclMessages& messages, const WaitGuard& patience);

  // Throws if NCCL reported an error since the last call.
  void check_health() const;

  // Ends the communicator when its work is done. Returns false, with the communicator still open, if that is not in
  // time.
  bool close(const WaitGuard& patience) noexcept;
  // Aborts all work at once. Returns when everything queued on the stream and every graph that captured it is gone,
  // which may be never. Takes the mutex, but not while it waits. Later holders of the mutex may only call close(),
  // which then does nothing.
  void abort() noexcept;
  // Leaves the communicator open for good.
  void forget() noexcept { communicator_ = nullptr; }

 private:
  void split(const NcclOptions& options, nccl::Config config, const WaitGuard& patience);
  void connect_peers(std::span<const int> peers, const std::string& agreement, const WaitGuard& patience);
  void check(nccl::Result result, const char* what) const;
  // Adds the messages inside the node, or the others, to the open group. Returns the first error.
  nccl::Result add(const NcclMessages& messages, bool inside) const;
  bool has_inside(const NcclMessages& messages) const;
  bool is_inside(int peer) const { return node_ && node_->ranks[static_cast<std::size_t>(peer)] >= 0; }
  // Waits until NCCL has finished a call on this communicator.
  void settle(nccl::Comm communicator, const char* what, const WaitGuard& patience) const;
  void close(nccl::Comm& communicator, const WaitGuard& patience);

  const nccl::Library& nccl_ = nccl::library();
  std::mutex mutex_;
  nccl::Comm communicator_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  CudaStream stream_;                       // highest priority: a late transfer delays all other ranks
  std::unique_ptr<NodeCommunicator> node_;  // null: all messages go over the group's
  Event caller_;
  std::vector<std::unique_ptr<NcclTexts>> texts_;
  std::optional<DeviceBytes> large_;  // what the first large gather has moved
};

// Collective, from one begin() to the next.
struct NcclCall {
  std::string text = "a transfer without begin()";
  std::chrono::milliseconds timeout{};
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();

  std::string in() const { return "in " + text + ": "; }
};

// Messages that go out together, and the CUDA event that marks their end. Reusable once all its transfers were waited
// for and, if it is watched, done.
struct NcclGroup {
  NcclMessages messages;
  int num_waits = 0;                     // transfers that were not waited for
  std::shared_ptr<const NcclCall> call;  // null until the group is launched
  Event done;
  bool is_captured = false;
  bool is_watched = false;
};

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const NcclOptions& options);
  ~NcclTransport() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
             StreamView stream) override;
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView stream) override;
  std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) override;
  void begin_group() override;
  void end_group(StreamView stream) override;
  bool is_stream_ordered() const override { return true; }
  Lanes* lanes() override { return lanes_.get(); }
  void check_stream(StreamView stream) const override;
  void check() override;
  void watch(DeferredCheck finding) override;
  void finish() noexcept override { finish_transfers(std::chrono::steady_clock::time_point::max()); }
  void abort(const std::string& reason) noexcept override { fail("", TransportError(reason), /*ask=*/false); }

  void wait(NcclGroup& group, StreamView stream);
  void give_up(const NcclGroup& group) noexcept;

 private:
  template <class Step>
  void or_fail(Step&& step);
  void connect();
  // Exchanges the call's words with `peers`, and has them compared when they have arrived.
  void compare(const std::string& call, std::span<const int> peers, StreamView stream);
  // Throws if the wait for NCCL to `what` is to end: it lasts too long, or the transport has failed.
  void check_wait(const char* what, std::chrono::steady_clock::time_point deadline) const;
  // Throws if the caller interrupts this thread's wait to `what`, or a peer has failed. Looks from time to time.
  void look(const char* what, bool asks_peers);
  NcclGroup& take_group();
  // Returns the open group, or a new one that add_transfer() launches at once.
  NcclGroup& join_group() { return open_group_ != nullptr ? *open_group_ : take_group(); }
  std::unique_ptr<Transfer> add_transfer(NcclGroup& group, StreamView stream);
  void launch(NcclGroup& group, StreamView stream);
  // Makes watched groups that are done reusable; the second function, a group that nothing uses.
  void collect_done();
  void put_back_if_over(NcclGroup& group);
  void wake_watchdog();

  // Records `prefix` and the first failure, aborts transfers in progress and notifies peers. Does nothing if the
  // transport has failed before. `ask`: adds what peers report. With `is_late`, calls that have returned may have
  // queued work behind the transfers: on_undefined_bytes may end the process before the abort.
  void fail(const std::string& prefix, const Error& error, bool ask, bool is_late = false) noexcept;
  [[noreturn]] void throw_failure(const char* prefix);
  [[noreturn]] void fail_and_throw(const std::string& prefix, const Error& error);
  void throw_if_failed();
  bool has_failed() const;
  void wait_for_abort() noexcept;
  std::shared_ptr<const NcclCall> call() const;

  void watch_all();
  bool look_at_all();
  // Runs `look`, which asks CUDA or NCCL by `function` and may not return for long.
  template <class Look>
  bool ask(const char* function, Look&& look);
  void note_asked(const char* function);
  // Sees what the watchdog cannot see while CUDA or NCCL keeps it. Calls neither.
  void watch_watchdog();
  void look_beside_watchdog(bool is_kept);
  // Throw the failure that they find. The first two tell whether something remains to be looked at.
  bool look_at_transfers();
  bool look_at_findings();
  void look_at_communicator();
  void look_at_peers();
  void note_first_due();
  std::string ask_peers(std::chrono::milliseconds interval);
  bool finish_transfers(std::chrono::steady_clock::time_point latest) noexcept;
  void close() noexcept;

  const NcclOptions options_;
  int device_ = 0;
  std::unique_ptr<CudaLanes> lanes_;  // from the start
  // Communicator, shared with the thread that aborts it.
  std::shared_ptr<NcclCommunicator> communicator_;
  std::atomic<bool> was_captured_{false};
  std::atomic<bool> give_up_{false};  // ends all polling of NCCL
  std::atomic<bool> is_launching_{false};
  NcclGroup* open_group_ = nullptr;
  std::vector<bool> is_connected_;            // with each rank, from the start
  std::unordered_set<std::size_t> compared_;  // hashes of words
  std::chrono::steady_clock::time_point next_look_{};

  // Guards groups and findings. Held during event queries, but never while waiting for the device or submitting work.
  std::mutex groups_mutex_;
  std::vector<std::unique_ptr<NcclGroup>> groups_;
  std::vector<NcclGroup*> idle_groups_;
  std::vector<NcclGroup*> watched_groups_;      // in the order in which they end
  std::vector<DeferredCheck> deferred_checks_;  // not yet known
  std::vector<DeferredCheck> known_checks_;     // destroyed by a caller's thread: may own device memory

  // Guards all fields below. Never held during a call of CUDA or NCCL.
  mutable std::mutex state_mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const NcclCall> call_ = std::make_shared<NcclCall>();
  std::optional<std::string> failure_;  // constant once is_told_
  bool is_timeout_ = false;
  bool is_told_ = false;
  std::shared_future<void> abort_;
  bool is_busy_ = false;  // groups may be watched, or graphs may run
  bool is_closing_ = false;
  std::shared_ptr<const NcclCall> first_due_;  // of the watched groups: the first deadline; null: there are none
  bool is_looking_ = false;                    // the watchdog is
  const char* asked_ = nullptr;                // the function of CUDA or NCCL that it calls, or null
  std::chrono::steady_clock::time_point asked_at_{};
  bool is_watchdog_over_ = false;
  std::thread watchdog_;  // runs from the first transfer on
  std::thread monitor_;   // of the watchdog, and as long
  // State of the thread that connects, then of the monitor's.
  std::chrono::steady_clock::time_point next_question_{};
  std::future<std::string> answer_;
};

class NcclTransfer final : public Transfer {
 public:
  // Creates a transfer; a null group moves nothing.
  NcclTransfer(NcclTransport& transport, NcclGroup* group) : transport_(transport), group_(group) {}
  ~NcclTransfer() override {
    if (group_ != nullptr) transport_.give_up(*group_);
  }
  void wait(StreamView stream) override {
    if (group_ == nullptr) return;
    transport_.wait(*group_, stream);
    group_ = nullptr;
  }

 private:
  NcclTransport& transport_;
  NcclGroup* group_;
};

}  // namespace zcomm
