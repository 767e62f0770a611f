#include "c10d_transport.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "zcomm/call_check.hpp"
#include "zcomm/error.hpp"

namespace zcomm::c10d_binding {
namespace {

constexpr const char* kFailureKey = "failure";
constexpr int kTags = 0x20000000;
constexpr std::chrono::milliseconds kLook{100};  // between looks at what else may have happened
// How long to wait with a message that does not match: the watch may know more.
constexpr std::chrono::seconds kMismatchPatience{3};
constexpr std::size_t kNumWatched = 2;  // this call and the last, which may have moved nothing here

struct C10dTransfer final : Transfer {
  explicit C10dTransfer(C10dTransport& its_transport) : transport(its_transport) {}
  ~C10dTransfer() override { transport.drop(shared); }
  void wait(StreamView) override { transport.wait(pending, shared); }

  C10dTransport& transport;
  std::vector<C10dTransport::Pending> pending;  // messages over Gloo
  MemoryChannels::Batch shared = 0;             // messages in memory
};

std::string lost(int peer, const std::string& why) { return "lost rank " + std::to_string(peer) + " (" + why + ")"; }

at::Tensor as_tensor(const std::byte* data, std::size_t num_bytes) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(num_bytes)}, at::kByte);
}

}  // namespace

C10dTransport::C10dTransport(BackendPtr group, int num_connections, StorePtr store, std::unique_ptr<NodeMemory> memory)
    : rank_(group->getRank()),
      size_(group->getSize()),
      group_(std::move(group)),
      num_connections_(num_connections),
      store_(std::move(store)),
      memory_(std::move(memory)),
      num_calls_(static_cast<std::size_t>(size_)),
      num_sent_(static_cast<std::size_t>(size_)),
      num_received_(static_cast<std::size_t>(size_)),
      watch_(store_, rank()) {}

void C10dTransport::begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                          StreamView) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw TransportError("this group failed before: " + *aborted_);
  }
  // Its last messages are in memory still; those of the next call will not come.
  if (const int peer = memory_ ? memory_->channels().find_failed() : -1; peer >= 0)
    throw TransportError(memory_->channels().reason_of(peer));
  timeout_ = timeout;
  deadline_ = deadline_after(timeout);
  call_ = call;
  call_tag_ = static_cast<int>(call_fingerprint(call) % kTags);
  std::vector<CallWatch::Channel> channels;
  for (const int peer : peers) {
    channels.push_back({std::min(rank(), peer), std::max(rank(), peer)});
    ++num_calls_[static_cast<std::size_t>(peer)];
  }
  watched_.push_back(
      watch_.begin(signature_text(call), call_fingerprint(call), channels, [this](const std::string& difference) {
        {
          const std::lock_guard lock(mutex_);
          difference_ = difference;
        }
        give_up(difference);
      }));
  if (watched_.size() > kNumWatched) {
    watch_.end(watched_.front());
    watched_.pop_front();
  }
}

int C10dTransport::next_tag(int& count, std::size_t num_bytes, std::int64_t num_elements, int sender, int receiver) {
  const std::size_t size = num_bytes + (static_cast<std::size_t>(num_elements) << 32);
  const std::size_t call = num_calls_[static_cast<std::size_t>(sender == rank_ ? receiver : sender)];
  const auto mixed = static_cast<int>((size * 0x9e3779b97f4a7c15u ^ call * 0xd1342543de82ef95u) >> 35);
  const int tag = (call_tag_ ^ count ^ mixed) * 2 + (sender < receiver ? 1 : 0);  // `mixed` has as many bits as kTags
  count = (count + 1) % kTags;
  return tag;
}

int C10dTransport::tag_of(const Send& send) {
  return next_tag(num_sent_[static_cast<std::size_t>(send.peer)], send.has_upper_bound ? 0 : send.num_bytes,
                  send.num_elements, rank(), send.peer);
}

int C10dTransport::tag_of(const Recv& recv) {
  return next_tag(num_received_[static_cast<std::size_t>(recv.peer)], recv.is_upper_bound ? 0 : recv.num_bytes,
                  recv.num_elements, recv.peer, rank());
}

std::unique_ptr<Transfer> C10dTransport::start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) {
  auto transfer = std::make_unique<C10dTransfer>(*this);
  std::vector<Pending>& pending = transfer->pending;
  pending.reserve(sends.size() + recvs.size());
  std::vector<at::Tensor> tensor(1);
  int peer = 0;
  try {
    for (const Recv& recv : recvs) {
      if (recv.num_bytes == 0 || is_shared(recv.peer)) continue;
      peer = recv.peer;
      tensor[0] = as_tensor(recv.data, recv.num_bytes);
      pending.emplace_back(group_->recv(tensor, peer, tag_of(recv)), peer);
    }
    for (const Send& send : sends) {
      if (send.num_bytes == 0 || is_shared(send.peer)) continue;
      peer = send.peer;
      tensor[0] = as_tensor(send.data, send.num_bytes);
      pending.emplace_back(group_->send(tensor, peer, tag_of(send)), peer);
    }
  } catch (const std::exception& error) {
    throw TransportError(first_failure(lost(peer, error.what())));
  }
  if (memory_) share(sends, recvs, transfer->shared);
  return transfer;
}

// Queues the messages inside the node. What goes to several ranks side by side in the list is copied once.
void C10dTransport::share(std::span<const Send> sends, std::span<const Recv> recvs, MemoryChannels::Batch& batch) {
  MemoryChannels& channels = memory_->channels();
  for (const Recv& recv : recvs) {
    if (recv.num_bytes == 0 || !is_shared(recv.peer)) continue;
    channels.recv(memory_->local_rank(recv.peer), recv.data, recv.num_bytes, recv.is_upper_bound,
                  static_cast<std::uint32_t>(tag_of(recv)), batch, recv.place);
  }
  std::vector<int> peers;
  std::vector<std::uint32_t> tags;
  const Send* first = nullptr;
  const auto flush = [&] {
    if (!peers.empty()) channels.send(peers, first->data, first->num_bytes, tags, batch);
    peers.clear();
    tags.clear();
  };
  for (const Send& send : sends) {
    if (send.num_bytes == 0 || !is_shared(send.peer)) continue;
    if (first == nullptr || send.data != first->data || send.num_bytes != first->num_bytes) flush();
    first = &send;
    peers.push_back(memory_->local_rank(send.peer));
    tags.push_back(static_cast<std::uint32_t>(tag_of(send)));
  }
  flush();
  channels.progress();
}

void C10dTransport::drop(const MemoryChannels::Batch& shared) noexcept {
  if (memory_) memory_->channels().drop(shared);
}

void C10dTransport::wait_in_memory(const MemoryChannels::Batch& batch) {
  MemoryChannels& channels = memory_->channels();
  int peer = CallWatch::kNobody;
  std::chrono::steady_clock::time_point differs_since{};
  bool has_asked = false;
  while (!channels.wait(batch, std::chrono::milliseconds(0))) {
    const int waits_for = channels.peers_of(batch).front();
    if (const int first = memory_->rank_of(waits_for); std::exchange(peer, first) != first) {
      watch_.wait_for(watched_.back(), peer);  // begins its patience anew
      differs_since = {};
    }
    const auto now = std::chrono::steady_clock::now();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - now);
    if (channels.wait(batch, std::clamp(left, std::chrono::milliseconds(1), kLook))) break;
    {
      const std::lock_guard lock(mutex_);
      if (!difference_.empty()) throw TransportError(difference_);
      if (aborted_) throw TransportError("this group failed: " + *aborted_);
    }
    // A peer that has told why, or has ended, may have sent all before.
    const int failed = channels.find_failed(batch);
    const int ended = memory_->find_ended(channels.peers_of(batch));
    if (channels.wait(batch, std::chrono::milliseconds(0))) break;
    if (failed >= 0 || ended >= 0 || left.count() <= 0) {
      watch_.wait_for(watched_.back(), CallWatch::kNobody);
      if (failed >= 0) fail(memory_->rank_of(failed), channels.reason_of(failed));
      fail(ended >= 0 ? ended : peer, lost(ended >= 0 ? ended : peer, "its process has ended"));
    }
    if (!channels.differs(waits_for)) {
      differs_since = {};
    } else if (differs_since == std::chrono::steady_clock::time_point{}) {
      differs_since = now;
    } else if (now - differs_since > kMismatchPatience) {
      throw_difference_to(peer);
      if (std::exchange(has_asked, true))  // the watch compares calls of the same number alone
        throw TransportError(describe_difference(rank(), call_, peer, "another call, whose message came first"));
      differs_since = now;  // the peer may be late to tell its call
    }
  }
}

void C10dTransport::wait(std::vector<Pending>& pending, const MemoryChannels::Batch& shared) {
  if (shared > 0) wait_in_memory(shared);
  for (auto& [work, peer] : pending) {
    watch_.wait_for(watched_.back(), peer);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    try {
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      watch_.wait_for(watched_.back(), CallWatch::kNobody);
      fail(peer, lost(peer, error.what()));
    }
  }
  watch_.wait_for(watched_.back(), CallWatch::kNobody);
  pending.clear();
}

void C10dTransport::throw_difference_to(int peer) {
  if (const std::string difference = watch_.find_difference(peer); !difference.empty())
    throw TransportError(difference);
}

void C10dTransport::fail(int peer, const std::string& found) {
  {
    const std::lock_guard lock(mutex_);
    if (!difference_.empty()) throw TransportError(difference_);
  }
  throw_difference_to(peer);  // a peer that has found one first has closed the connections
  if (std::chrono::steady_clock::now() >= deadline_) {
    throw TimeoutError("rank " + std::to_string(peer) + " did not answer within " + std::to_string(timeout_.count()) +
                       " ms: it is stuck, waits for another rank, or its call went another way (are zcomm.exact() and "
                       "zcomm.override() the same on all ranks, and gathering in place and contiguity?)");
  }
  throw TransportError(first_failure(found));
}

std::string C10dTransport::first_failure(const std::string& found) {
  const auto answer = ask([store = store_] { return text_in(*store, kFailureKey); });
  return answer && *answer ? **answer : found;
}

void C10dTransport::abort(const std::string& reason) noexcept {
  const std::string cause = first_cause("rank " + std::to_string(rank()) + " gave up " + reason);
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = cause;
  }
  give_up(cause);
}

void C10dTransport::give_up(const std::string& text) {
  if (memory_) memory_->channels().fail(text);
  // Stores the reason before the connections close, so that peers find it. The first reason stays.
  ask([store = store_, text] { return store->compareSet(kFailureKey, "", text); });
  close_connections();
}

void C10dTransport::close_connections() noexcept {
  // Times out a wait for each tag, which is the only way to close Gloo's connections. It also closes those to other
  // ranks with equal tags. A peer that has gone ends the wait earlier and leaves the others open.
  for (int tag = 0x7fffffff; tag > 0x7fffffff - num_connections_; --tag) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      try {
        std::vector<at::Tensor> tensor{at::empty({1}, at::kByte)};
        group_->recv(tensor, peer, tag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // Expected.
      }
    }
  }
}

}  // namespace zcomm::c10d_binding
