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
constexpr std::size_t kNumWatched = 2;  // this call and the last, which may have moved nothing here

class C10dTransfer final : public Transfer {
 public:
  C10dTransfer(C10dTransport& transport, std::vector<C10dTransport::Pending> pending)
      : transport_(transport), pending_(std::move(pending)) {}
  void wait(StreamView) override { transport_.wait(pending_); }

 private:
  C10dTransport& transport_;
  std::vector<C10dTransport::Pending> pending_;
};

at::Tensor as_tensor(const std::byte* data, std::size_t num_bytes) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(num_bytes)}, at::kByte);
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<::c10d::Backend> group, int num_connections,
                             c10::intrusive_ptr<::c10d::Store> store)
    : group_(std::move(group)),
      store_(std::move(store)),
      num_connections_(num_connections),
      num_sent_(static_cast<std::size_t>(group_->getSize())),
      num_received_(static_cast<std::size_t>(group_->getSize())),
      watch_(store_, rank(), size()) {}

void C10dTransport::begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw TransportError("this group failed before: " + *aborted_);
  }
  timeout_ = timeout;
  deadline_ = std::chrono::steady_clock::now() + timeout;
  call_tag_ = static_cast<int>(call_fingerprint(call) % kTags);
  std::vector<CallWatch::Channel> channels;
  for (const int peer : peers) channels.push_back({std::min(rank(), peer), std::max(rank(), peer)});
  watched_.push_back(
      watch_.begin(call_words(call), call_fingerprint(call), channels, [this](const std::string& difference) {
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

std::vector<C10dTransport::Pending> C10dTransport::post(std::span<const Send> sends, std::span<const Recv> recvs) {
  std::vector<Pending> pending;
  pending.reserve(sends.size() + recvs.size());
  std::vector<at::Tensor> tensor(1);
  int peer = 0;
  try {
    for (const Recv& recv : recvs) {
      if (recv.num_bytes == 0) continue;
      peer = recv.peer;
      tensor[0] = as_tensor(recv.data, recv.num_bytes);
      int& count = num_received_[static_cast<std::size_t>(peer)];
      pending.push_back(
          {group_->recv(tensor, peer, tag_of(count, recv.is_limit ? 0 : recv.num_bytes, peer, rank())), peer});
      count = (count + 1) % kTags;
    }
    for (const Send& send : sends) {
      if (send.num_bytes == 0) continue;
      peer = send.peer;
      tensor[0] = as_tensor(send.data, send.num_bytes);
      int& count = num_sent_[static_cast<std::size_t>(peer)];
      pending.push_back(
          {group_->send(tensor, peer, tag_of(count, send.has_limit ? 0 : send.num_bytes, rank(), peer)), peer});
      count = (count + 1) % kTags;
    }
  } catch (const std::exception& error) {
    throw TransportError("lost rank " + std::to_string(peer) + failure_of_peers() + " (" + error.what() + ")");
  }
  return pending;
}

std::unique_ptr<Transfer> C10dTransport::start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) {
  return std::make_unique<C10dTransfer>(*this, post(sends, recvs));
}

void C10dTransport::wait(std::vector<Pending>& pending) {
  for (auto& [work, peer] : pending) {
    watch_.wait_for(watched_.back(), peer);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    try {
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      watch_.wait_for(watched_.back(), CallWatch::kNobody);
      fail(peer, error);
    }
  }
  watch_.wait_for(watched_.back(), CallWatch::kNobody);
  pending.clear();
}

void C10dTransport::fail(int peer, const std::exception& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!difference_.empty()) throw TransportError(difference_);
  }
  // A peer that has found a difference first has closed the connections.
  if (const auto answer = ask(watch_.difference_to(peer)); answer && *answer) throw TransportError((*answer)->words);
  if (std::chrono::steady_clock::now() >= deadline_) {
    throw TimeoutError("rank " + std::to_string(peer) + " did not answer within " + std::to_string(timeout_.count()) +
                       " ms: it is stuck, or its call went another way (are zcomm.exact() and zcomm.override() "
                       "the same on all ranks, and gathering in place and contiguity?)");
  }
  throw TransportError("lost rank " + std::to_string(peer) + failure_of_peers() + " (" + error.what() + ")");
}

std::string C10dTransport::failure_of_peers() {
  const auto answer = ask([store = store_]() -> std::string {
    if (!store->check({kFailureKey})) return {};
    const std::vector<std::uint8_t> text = store->get(kFailureKey);
    return ": " + std::string(text.begin(), text.end());
  });
  return answer.value_or("");
}

void C10dTransport::abort(const std::string& reason) noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return;
      aborted_ = reason;
    }
    give_up(reason);
  } catch (const std::exception&) {
    // No memory for the reason.
    close_connections();
  }
}

void C10dTransport::give_up(const std::string& reason) {
  // Stores the reason before the connections close, so that peers find it. The first reason stays.
  ask([store = store_, text = "rank " + std::to_string(rank()) + " gave up " + reason] {
    return store->compareSet(kFailureKey, "", text);
  });
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
