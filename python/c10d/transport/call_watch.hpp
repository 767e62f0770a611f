// Detection of ranks that called different things, over a c10d store. During a long wait, a rank compares its calls
// with those of the rank that it waits for. Short waits cost nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "c10d/base/pointers.hpp"
#include "host/detached.hpp"

namespace zcomm::c10d_binding {

// Returns the result of `request`, or nothing if the store throws or does not answer: its rank has ended or hangs. The
// request may outlive the caller, so it must own all that it uses.
template <class Request>
auto ask(Request request) noexcept -> std::optional<decltype(request())> {
  constexpr std::chrono::seconds kStorePatience{2};
  try {
    auto answer = run_detached(std::move(request));
    if (answer.wait_for(kStorePatience) == std::future_status::ready) return answer.get();
  } catch (const std::exception&) {
    // The store failed or did not answer.
  }
  return std::nullopt;
}

class CallWatch {
 public:
  using Id = std::uint64_t;
  static constexpr int kNobody = -1;

  // Calls of one sequence, which the ranks of a channel number alike.
  struct Channel {
    int from;  // for a collective the lower rank
    int to;
    int tag = -1;  // of a message
    friend auto operator<=>(const Channel&, const Channel&) = default;
  };

  // Takes a `store` with the keys "calls/RANK".
  CallWatch(StorePtr store, int rank) : store_(std::move(store)), rank_(rank) {}
  ~CallWatch();

  // Records the next call of this rank on each channel. Calls of different `kind` never match. `on_difference` receives
  // both calls as signatures, at most once, on a thread of this object that starts with the first call, or of a caller.
  Id begin(std::string signature, std::uint64_t kind, std::span<const Channel> channels,
           std::function<void(const std::string&)> on_difference);
  // Records that this rank waits for `peer` in a call.
  void wait_for(Id call, int peer);
  // Forgets a call, unless it differed: its peer may not know yet.
  void end(Id call);
  // Leaves out what this rank receives with a tag from now on, as it receives from anybody: its numbers are unknown.
  void ignore(int tag);

  // Compares the calls with a peer's now, unless the store does not answer. A difference is given to `on_difference` of
  // its call and returned; without one the text is empty.
  std::string find_difference(int peer);

 private:
  using Difference = std::pair<Id, std::string>;  // a call, and both signatures: its own and the peer's
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::string signature;
    std::uint64_t kind = 0;
    std::map<Channel, std::uint64_t> numbers = {};
    std::function<void(const std::string&)> on_difference = {};
    int peer = kNobody;
    Clock::time_point next = {};  // the next comparison
    Clock::duration pause = {};
    bool differs = false;
  };
  using Calls = std::map<Id, Call>;
  static bool meet(const Call& one, const Call& other);
  static std::string text_of(const Calls& calls);
  static Calls parse(const std::string& text);
  // Returns a request to the store, for a separate thread: it may never return, may throw the store's exceptions, and
  // may outlive this object. The request publishes this rank's calls and compares them with the peer's.
  std::function<std::optional<Difference>()> difference_to(int peer);
  static std::optional<Difference> compare(::c10d::Store& store, const Calls& own, int rank, int peer);
  // Gives a difference to its call, once.
  void tell(const Difference& difference);
  std::set<int> overdue();
  void watch();

  const StorePtr store_;
  const int rank_;
  std::mutex mutex_;  // guards all fields below
  std::condition_variable stop_requested_;
  Id num_begun_ = 0;
  Calls calls_;
  std::map<Channel, std::uint64_t> num_calls_;
  std::set<int> ignored_;  // tags
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace zcomm::c10d_binding
