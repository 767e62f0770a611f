// Transport over send and recv of a c10d process group, Gloo's, on a CPU; inside a node over memory that its ranks
// share, where they can.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "c10d/base/pointers.hpp"
#include "call_watch.hpp"
#include "node_memory.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

class C10dTransport final : public Transport {
 public:
  // Takes a `group` of its own, so that its messages never match others. Tags select one of `num_connections` between
  // two ranks. `store` carries the reason of a failure, and the calls of a CallWatch, to the peers. `memory` may be
  // null.
  C10dTransport(BackendPtr group, int num_connections, StorePtr store, std::unique_ptr<NodeMemory> memory);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
             StreamView stream) override;
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView stream) override;
  void abort(const std::string& reason) noexcept override;

  using Pending = std::pair<WorkPtr, int>;  // and its peer
  // Blocks until all is done: what is in memory, then the rest.
  void wait(std::vector<Pending>& pending, const MemoryChannels::Batch& shared);
  void drop(const MemoryChannels::Batch& shared) noexcept;

 private:
  void share(std::span<const Send> sends, std::span<const Recv> recvs, MemoryChannels::Batch& batch);
  void wait_in_memory(const MemoryChannels::Batch& batch);
  bool is_shared(int peer) const { return memory_ && memory_->local_rank(peer) >= 0; }
  // Asks the group's store for the calls of `peer`, and throws if they differ.
  void throw_difference_to(int peer);
  // Throws that calls differ, that `peer` is late, or what has failed first: `found`, unless another rank has told.
  [[noreturn]] void fail(int peer, const std::string& found);
  // Tells the peers why, in words for all ranks, and closes the connections.
  void give_up(const std::string& text);
  void close_connections() noexcept;
  std::string first_failure(const std::string& found);

  const int rank_;
  const int size_;
  const BackendPtr group_;
  const int num_connections_;
  StorePtr store_;
  const std::unique_ptr<NodeMemory> memory_;
  // Returns the tag of the next message, and counts it. The tag is computed from the numbers of the call and of the
  // message between two ranks, which both count, from the call's words and from the sizes, in bytes 0 if only a limit
  // is known. Of messages of different sizes that match, Gloo ends the process at one and leaves the other incomplete,
  // so they must not match. Messages of different calls must not match either: one rank may have a message in a call
  // that the other lacks. So both name each other in begin(). Ranks that call different things wait until the watch
  // finds it. The lowest bit separates directions: while one thread sends on a connection, Gloo's own thread spins if
  // bytes arrive on it.
  int next_tag(int& count, std::size_t num_bytes, std::int64_t num_elements, int sender, int receiver);
  int tag_of(const Send& send);
  int tag_of(const Recv& recv);
  std::string call_;
  int call_tag_ = 0;
  std::vector<std::size_t> num_calls_;  // with each rank, as the next two
  std::vector<int> num_sent_;
  std::vector<int> num_received_;
  std::chrono::steady_clock::time_point deadline_;
  std::chrono::milliseconds timeout_{0};

  std::deque<CallWatch::Id> watched_;
  std::mutex mutex_;  // guards the next two
  std::optional<std::string> aborted_;
  std::string difference_;  // found by the watch
  CallWatch watch_;         // last: its thread uses all fields above
};

}  // namespace zcomm::c10d_binding
