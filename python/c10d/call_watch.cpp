#include "call_watch.hpp"

#include <algorithm>
#include <sstream>

#include "zcomm/call_check.hpp"

namespace zcomm::c10d_binding {
namespace {

// A wait as long as this is compared, and again after twice as long: it may be that a peer comes later, which costs the
// store few requests.
constexpr std::chrono::milliseconds kPatience{500};
constexpr std::chrono::milliseconds kMostPatience{8000};
constexpr std::size_t kNumKept = 2;

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

std::optional<std::string> CallWatch::difference_to(int peer) {
  std::deque<Call> own;
  {
    const std::lock_guard lock(mutex_);
    own = calls_;
  }
  std::string text;  // of each call a line of its words and one of pairs of numbers
  for (const auto& [words, numbers] : own) {
    text += words + "\n";
    for (const auto& [other, number] : numbers) text += std::to_string(other) + " " + std::to_string(number) + " ";
    text += "\n";
  }
  store_->set(key_of(rank_), std::vector<std::uint8_t>(text.begin(), text.end()));
  if (!store_->check({key_of(peer)})) return std::nullopt;
  const std::vector<std::uint8_t> answer = store_->get(key_of(peer));
  std::istringstream lines(std::string(answer.begin(), answer.end()));
  for (std::string words, pairs; std::getline(lines, words) && std::getline(lines, pairs);) {
    std::istringstream numbers(pairs);
    int other = -1;
    std::uint64_t number = 0;
    while (numbers >> other >> number && other != rank_) continue;
    if (other != rank_) continue;  // a call without this rank
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
  Clock::time_point watched{};  // the start of the wait that `pause` is for
  while (!stop_requested_.wait_for(lock, pause, [this] { return stopped_; })) {
    if (watched != since_) pause = kPatience;
    watched = since_;
    if (peer_ < 0 || Clock::now() - since_ < kPatience) continue;
    const int peer = peer_;
    lock.unlock();
    try {
      if (const auto difference = difference_to(peer)) {
        on_difference_(*difference);
        return;
      }
    } catch (const std::exception&) {
      // The store went with the rank that served it: that is for the wait itself to find.
    }
    pause = std::min(2 * pause, kMostPatience);
    lock.lock();
  }
}

}  // namespace zcomm::c10d_binding
