// Detection of ranks that called different things, over a c10d store. During a long wait, a rank compares its calls
// with those of the rank that it waits for. Short waits cost nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace zcomm::c10d_binding {

class CallWatch {
 public:
  // Takes a `store` with the keys "calls/RANK". `on_difference` receives both calls in words, on a thread of this
  // object that starts with the first call.
  CallWatch(c10::intrusive_ptr<::c10d::Store> store, int rank, std::function<void(const std::string&)> on_difference);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // Records the next call of this rank with `peers`.
  void begin(const std::string& call, std::span<const int> peers);
  // Records that this rank waits for `peer` until the next such call; -1: for nobody.
  void wait_for(int peer);

  // Returns a request to the store, for a separate thread: it may never return, may throw the store's exceptions, and
  // may outlive this object. The request publishes this rank's calls and compares them with the peer's. It returns both
  // calls in words if they differ. Two ranks number the calls that they make with each other.
  std::function<std::optional<std::string>()> difference_to(int peer);

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::string words;
    std::map<int, std::uint64_t> numbers;  // of this call, among those with each peer
  };
  static std::optional<std::string> compare(::c10d::Store& store, const std::deque<Call>& own, int rank, int peer);
  void watch();

  const c10::intrusive_ptr<::c10d::Store> store_;
  const int rank_;
  const std::function<void(const std::string&)> on_difference_;
  std::mutex mutex_;  // guards all fields below
  std::condition_variable stop_requested_;
  std::deque<Call> calls_;                  // this call and the last, which may have moved nothing here
  std::map<int, std::uint64_t> num_calls_;  // with each peer
  int peer_ = -1;
  Clock::time_point since_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace zcomm::c10d_binding
