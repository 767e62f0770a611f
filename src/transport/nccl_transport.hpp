// Transfers over one NCCL communicator, and the watchdog that aborts failed ones.
#pragma once

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/nccl_communicator.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {

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
  bool starts_at_once() const override { return false; }
  bool takes_limits() const override { return false; }
  void check() override;
  void watch(Finding finding) override;
  void finish() noexcept override { finish_transfers(); }
  void abort(const std::string& reason) noexcept override { fail("", TransportError(reason), /*ask=*/false); }

  void wait(NcclGroup& group, StreamView stream);
  void give_up(const NcclGroup& group) noexcept;

 private:
  template <class Step>
  void or_fail(Step&& step);
  void connect();
  // Exchanges the call's words with `peers`, and has them compared when they have arrived.
  void compare(const std::string& call, std::span<const int> peers, StreamView stream);
  std::vector<int> peers() const;
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
  // Throw the failure that they find.
  void look_at_transfers();
  void look_at_findings();
  void look_at_communicator();
  void look_at_peers();
  std::string ask_peers(std::chrono::milliseconds interval);
  void forget_known_findings();
  bool finish_transfers() noexcept;
  void close() noexcept;

  const NcclOptions options_;
  int device_ = 0;
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
  std::vector<NcclGroup*> watched_groups_;  // in the order in which they end
  std::vector<Finding> findings_;           // not yet known
  std::vector<Finding> known_findings_;     // destroyed by a caller's thread: may own device memory

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
  std::thread watchdog_;  // runs from the first transfer on
  // State of the thread that connects, then of the watchdog's.
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
