#include "call_watch.hpp"

#include <algorithm>
#include <sstream>

#include "zcomm/call_check.hpp"

namespace zcomm::c10d_binding {
namespace {

// Length of a wait after which calls are compared, then again after twice as long each time. Doubling keeps requests to
// the store few, if a peer is only late.
constexpr std::chrono::milliseconds kPatience{500};
constexpr std::chrono::milliseconds kMostPatience{8000};

std::string calls_key(int rank) { return "calls/" + std::to_string(rank); }

}  // namespace

CallWatch::~CallWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stop_requested_.notify_all();
  if (thread_.joinable()) thread_.join();
}

CallWatch::Id CallWatch::begin(std::string signature, std::uint64_t kind, std::span<const Channel> channels,
                               std::function<void(const std::string&)> on_difference) {
  const std::lock_guard lock(mutex_);
  Call& call = calls_[++num_begun_];
  call.signature = std::move(signature);
  call.kind = kind;
  call.on_difference = std::move(on_difference);
  for (const Channel& channel : channels) {
    const bool is_ignored = channel.to == rank_ && ignored_.contains(channel.tag);
    if (!is_ignored) call.numbers[channel] = num_calls_[channel]++;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  return num_begun_;
}

void CallWatch::wait_for(Id id, int peer) {
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(id);
  if (call == calls_.end() || call->second.differs) return;
  call->second.peer = peer;
  call->second.next = Clock::now() + kPatience;
  call->second.pause = kPatience;
}

void CallWatch::end(Id id) {
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(id);
  if (call == calls_.end() || call->second.differs) return;
  calls_.erase(call);
}

void CallWatch::ignore(int tag) {
  const std::lock_guard lock(mutex_);
  ignored_.insert(tag);
}

std::function<std::optional<CallWatch::Difference>()> CallWatch::difference_to(int peer) {
  const std::lock_guard lock(mutex_);
  // Clones the store: a thread that waits keeps its connection locked.
  return [store = store_, own = calls_, rank = rank_, peer] { return compare(*store->clone(), own, rank, peer); };
}

std::string CallWatch::find_difference(int peer) {
  const auto answer = ask(difference_to(peer));
  if (!answer || !*answer) return {};
  tell(**answer);
  return (*answer)->second;
}

bool CallWatch::meet(const Call& one, const Call& other) {
  return std::ranges::any_of(one.numbers, [&](const auto& item) {
    const auto found = other.numbers.find(item.first);
    return found != other.numbers.end() && found->second == item.second;
  });
}

// For each call a line of its signature, and one of its kind and its numbers.
std::string CallWatch::text_of(const Calls& calls) {
  std::ostringstream text;
  for (const auto& [id, call] : calls) {
    text << call.signature << "\n" << call.kind;
    for (const auto& [channel, number] : call.numbers) {
      text << " " << channel.from << " " << channel.to << " " << channel.tag << " " << number;
    }
    text << "\n";
  }
  return text.str();
}

CallWatch::Calls CallWatch::parse(const std::string& text) {
  Calls calls;
  std::istringstream lines(text);
  for (std::string signature, pairs; std::getline(lines, signature) && std::getline(lines, pairs);) {
    Call& call = calls[calls.size()];
    call.signature = signature;
    std::istringstream numbers(pairs);
    numbers >> call.kind;
    Channel channel{};
    for (std::uint64_t number = 0; numbers >> channel.from >> channel.to >> channel.tag >> number;) {
      call.numbers[channel] = number;
    }
  }
  return calls;
}

std::optional<CallWatch::Difference> CallWatch::compare(::c10d::Store& store, const Calls& own, int rank, int peer) {
  store.set(calls_key(rank), text_of(own));
  const std::optional<std::string> answer = text_in(store, calls_key(peer));
  if (!answer) return std::nullopt;
  const Calls theirs = parse(*answer);
  for (const auto& [id, call] : own) {
    if (call.differs) continue;
    for (const auto& [other_id, other] : theirs) {
      if (call.kind != other.kind && meet(call, other))
        return Difference{id, describe_difference(rank, call.signature, peer, other.signature)};
    }
  }
  return std::nullopt;
}

// Returns the ranks to compare with now.
std::set<int> CallWatch::overdue() {
  std::set<int> peers;
  const Clock::time_point now = Clock::now();
  for (auto& [id, call] : calls_) {
    if (call.peer == kNobody || now < call.next) continue;
    if (call.peer != rank_) peers.insert(call.peer);
    call.pause = std::min<Clock::duration>(2 * call.pause, kMostPatience);
    call.next = now + call.pause;
  }
  return peers;
}

void CallWatch::tell(const Difference& difference) {
  const auto& [id, signature] = difference;
  std::function<void(const std::string&)> on_difference;
  {
    const std::lock_guard lock(mutex_);
    const auto call = calls_.find(id);
    if (call == calls_.end() || call->second.differs) return;
    call->second.differs = true;
    call->second.peer = kNobody;
    on_difference = std::exchange(call->second.on_difference, {});
  }
  on_difference(signature);
}

void CallWatch::watch() {
  std::map<int, std::future<std::optional<Difference>>> asked;  // requests to the store, by peer
  std::unique_lock lock(mutex_);
  while (!stop_requested_.wait_for(lock, kPatience, [this] { return stopped_; })) {
    for (const int peer : overdue()) {
      if (stopped_) return;
      lock.unlock();
      auto& answer = asked[peer];
      try {
        if (!answer.valid()) answer = run_detached(difference_to(peer));
        if (answer.wait_for(kPatience) == std::future_status::ready) {
          if (const auto difference = answer.get()) tell(*difference);
        }
      } catch (const std::exception&) {
        // The store ended with the rank that served it; the wait itself will notice.
      }
      lock.lock();
    }
  }
}

}  // namespace zcomm::c10d_binding
