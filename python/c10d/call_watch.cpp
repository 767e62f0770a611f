#include "call_watch.hpp"

#include <algorithm>
#include <sstream>

#include "host/aside.hpp"
#include "zcomm/call_check.hpp"

namespace zcomm::c10d_binding {
namespace {

// Length of a wait after which calls are compared, then again after twice as long each time. Doubling keeps requests to
// the store few, if a peer is only late.
constexpr std::chrono::milliseconds kPatience{500};
constexpr std::chrono::milliseconds kMostPatience{8000};
constexpr std::size_t kNumKept = 2;

std::string calls_key(int rank) { return "calls/" + std::to_string(rank); }

}  // namespace

CallWatch::CallWatch(c10::intrusive_ptr<::c10d::Store> store, int rank,
                     std::function<void(const std::string&)> on_difference)
    : store_(std::move(store)), rank_(rank), on_difference_(std::move(on_difference)) {}

CallWatch::~CallWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stop_requested_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CallWatch::begin(const std::string& call, std::span<const int> peers) {
  const std::lock_guard lock(mutex_);
  calls_.push_back({call_words(call), {}});
  for (const int peer : peers) calls_.back().numbers[peer] = num_calls_[peer]++;
  if (calls_.size() > kNumKept) calls_.pop_front();
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
}

void CallWatch::wait_for(int peer) {
  const std::lock_guard lock(mutex_);
  peer_ = peer;
  since_ = Clock::now();
}

std::function<std::optional<std::string>()> CallWatch::difference_to(int peer) {
  const std::lock_guard lock(mutex_);
  return [store = store_, own = calls_, rank = rank_, peer] { return compare(*store, own, rank, peer); };
}

std::optional<std::string> CallWatch::compare(::c10d::Store& store, const std::deque<Call>& own, int rank, int peer) {
  std::string text;  // for each call a line of its words and one of pairs of numbers
  for (const auto& [words, numbers] : own) {
    text += words + "\n";
    for (const auto& [other, number] : numbers) text += std::to_string(other) + " " + std::to_string(number) + " ";
    text += "\n";
  }
  store.set(calls_key(rank), std::vector<std::uint8_t>(text.begin(), text.end()));
  if (!store.check({calls_key(peer)})) return std::nullopt;
  const std::vector<std::uint8_t> answer = store.get(calls_key(peer));
  std::istringstream lines(std::string(answer.begin(), answer.end()));
  for (std::string words, pairs; std::getline(lines, words) && std::getline(lines, pairs);) {
    std::istringstream numbers(pairs);
    int other = -1;
    std::uint64_t number = 0;
    while (numbers >> other >> number && other != rank) continue;
    if (other != rank) continue;  // a call without this rank
    for (const Call& call : own) {
      const auto mine = call.numbers.find(peer);
      if (mine == call.numbers.end() || mine->second != number || call.words == words) continue;
      return describe_difference(call.words, peer, words);
    }
  }
  return std::nullopt;
}

void CallWatch::watch() {
  std::unique_lock lock(mutex_);
  std::chrono::milliseconds pause = kPatience;
  Clock::time_point watched{};                     // start of the wait that `pause` belongs to
  std::future<std::optional<std::string>> answer;  // of a request to the store in progress
  while (!stop_requested_.wait_for(lock, pause, [this] { return stopped_; })) {
    if (watched != since_) pause = kPatience;
    watched = since_;
    if (peer_ < 0 || Clock::now() - since_ < kPatience) continue;
    const int peer = peer_;
    lock.unlock();
    try {
      if (!answer.valid()) answer = run_aside(difference_to(peer));
      if (answer.wait_for(kPatience) == std::future_status::ready) {
        if (const auto difference = answer.get()) {
          on_difference_(*difference);
          return;
        }
      }
    } catch (const std::exception&) {
      // The store ended with the rank that served it; the wait itself will notice.
    }
    pause = std::min(2 * pause, kMostPatience);
    lock.lock();
  }
}

}  // namespace zcomm::c10d_binding
