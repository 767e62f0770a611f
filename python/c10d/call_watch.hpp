// How ranks over a c10d store notice that they called different things: while a wait is long, each compares its calls
// with those of the rank that it waits for. A call that is not kept waiting sends nothing for it.
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
  // `store`: the keys "calls/RANK" are used. `on_difference` gets both calls in words, on a thread of this object,
  // which starts with the first call.
  CallWatch(c10::intrusive_ptr<::c10d::Store> store, int rank, std::function<void(const std::string&)> on_difference);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // The next call of this rank with `peers`.
  void begin(const std::string& call, std::span<const int> peers);
  // From here on this rank waits for `peer`, until the next of these calls; -1: for nobody.
  void wait_for(int peer);

  // Compares now, after telling what this rank calls. Both calls in words, if they differ: two ranks count the calls
  // that they make with each other. Throws what the store throws.
  std::optional<std::string> difference_to(int peer);

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::string words;
    std::map<int, std::uint64_t> numbers;  // of this call among those with each peer
  };
  std::string key_of(int rank) const { return "calls/" + std::to_string(rank); }
  void watch();

  const c10::intrusive_ptr<::c10d::Store> store_;
  const int rank_;
  const std::function<void(const std::string&)> on_difference_;
  std::mutex mutex_;  // of what follows
  std::condition_variable stop_requested_;
  std::deque<Call> calls_;                  // this one and the one before, as that may have moved nothing here
  std::map<int, std::uint64_t> num_calls_;  // with each peer
  int peer_ = -1;
  Clock::time_point since_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace zcomm::c10d_binding
