// Ranks as threads of one process. A message is one memcpy, done by the side that arrives second.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "zcomm/call_check.hpp"
#include "zcomm/error.hpp"
#include "zcomm/transport.hpp"

namespace zcomm {
namespace {

struct Message {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t num_bytes = 0;  // as given by the first side; once matched, the bytes sent
  std::int64_t num_elements = 0;
  bool is_upper_bound = false;  // set by the receiver
  // Flags guarded by Hub::mutex. A matched message is being copied until `done`: neither side may release its memory.
  bool matched = false;
  bool done = false;
  bool dropped = false;  // its owner gave up before it was matched
};

struct Hub {
  explicit Hub(int num_ranks)
      : size(num_ranks), waiting(static_cast<std::size_t>(num_ranks) * static_cast<std::size_t>(num_ranks)) {}

  // Returns the messages of which one side waits for the other: all sends or all receives.
  std::deque<std::shared_ptr<Message>>& between(int source, int target) {
    return waiting[static_cast<std::size_t>(source) * static_cast<std::size_t>(size) +
                   static_cast<std::size_t>(target)];
  }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<std::shared_ptr<Message>>> waiting;
  std::string failure;  // empty without a failure
};

bool agree(std::size_t sent, std::size_t room, bool is_upper_bound) {
  return is_upper_bound ? sent <= room : sent == room;
}

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }

  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
             StreamView) override {
    deadline_ = deadline_after(timeout);
    peers_.assign(peers.begin(), peers.end());
    std::sort(peers_.begin(), peers_.end());
    const CallText own = call_text(call);
    std::vector<CallText> theirs(peers_.size());
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      sends.push_back({peers_[i], reinterpret_cast<const std::byte*>(own.data()), own.size()});
      recvs.push_back({peers_[i], reinterpret_cast<std::byte*>(theirs[i].data()), own.size()});
    }
    start(sends, recvs, {})->wait({});
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      const std::string found = difference(rank(), own, peers_[i], theirs[i]);
      if (!found.empty()) throw TransportError(found);
    }
  }

  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) override {
    for (const Send& send : sends) check_peer(send.peer, send.num_bytes);
    for (const Recv& recv : recvs) check_peer(recv.peer, recv.num_bytes);
    Matches found;
    {
      const std::lock_guard lock(hub_->mutex);
      if (!hub_->failure.empty()) throw TransportError(hub_->failure);
      for (const Send& send : sends) {
        const auto fits = [&](const Message& m) { return agree(send.num_bytes, m.num_bytes, m.is_upper_bound); };
        match(found, hub_->between(rank_, send.peer), true, send, fits, [&](Message& m) {
          m.source = send.data;
          m.num_bytes = send.num_bytes;
        });
      }
      for (const Recv& recv : recvs) {
        const auto fits = [&](const Message& m) { return agree(m.num_bytes, recv.num_bytes, recv.is_upper_bound); };
        match(found, hub_->between(recv.peer, rank_), false, recv, fits, [&](Message& m) {
          m.target = recv.data;
          m.is_upper_bound = recv.is_upper_bound;
        });
      }
    }
    for (const auto& message : found.complete) std::memcpy(message->target, message->source, message->num_bytes);
    if (!found.complete.empty()) {
      const std::lock_guard lock(hub_->mutex);
      for (const auto& message : found.complete) message->done = true;
      hub_->changed.notify_all();
    }
    auto transfer = std::make_unique<LocalTransfer>(*this, std::move(found.all));
    if (!found.error.empty()) throw TransportError(found.error);
    return transfer;
  }

  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(hub_->mutex);
    if (hub_->failure.empty()) hub_->failure = "rank " + std::to_string(rank_) + " aborted " + reason;
    hub_->changed.notify_all();
  }

 private:
  class LocalTransfer final : public Transfer {
   public:
    LocalTransfer(LocalTransport& transport, std::vector<std::shared_ptr<Message>> messages)
        : transport_(transport), messages_(std::move(messages)) {}
    ~LocalTransfer() override {
      std::unique_lock lock(transport_.hub_->mutex);
      for (const auto& message : messages_) {
        if (message->matched) {
          transport_.hub_->changed.wait(lock, [&] { return message->done; });
        } else {
          message->dropped = true;
        }
      }
    }
    void wait(StreamView) override {
      std::unique_lock lock(transport_.hub_->mutex);
      for (const auto& message : messages_) {
        const auto ready = [&] { return message->done || (!message->matched && !transport_.hub_->failure.empty()); };
        if (transport_.deadline_ == std::chrono::steady_clock::time_point::max()) {
          transport_.hub_->changed.wait(lock, ready);
        } else if (!transport_.hub_->changed.wait_until(lock, transport_.deadline_, ready)) {
          throw TimeoutError("rank " + std::to_string(transport_.rank_) + " timed out waiting for its peers");
        }
        if (!message->done) throw TransportError(transport_.hub_->failure);
      }
    }

   private:
    LocalTransport& transport_;
    std::vector<std::shared_ptr<Message>> messages_;
  };

  // Throws if begin() named peers without this one. Others connect ranks by these names, so an operation that lacks one
  // must not pass its tests over threads.
  void check_peer(int peer, std::size_t num_bytes) const {
    if (num_bytes == 0 || peers_.empty() || std::binary_search(peers_.begin(), peers_.end(), peer)) return;
    throw TransportError("peer: expected one that the call has named, got rank " + std::to_string(peer));
  }

  // What a start has found of its messages.
  struct Matches {
    std::vector<std::shared_ptr<Message>> all;
    std::vector<std::shared_ptr<Message>> complete;  // matched here, to be copied now
    std::string error;
  };

  // Joins one side of a message to the other side that waits, if it fits, or makes it wait.
  template <class Side, class Fits, class Fill>
  void match(Matches& found, std::deque<std::shared_ptr<Message>>& waiting, bool is_send, const Side& side,
             const Fits& fits, const Fill& fill) const {
    if (side.num_bytes == 0 || !found.error.empty()) return;
    std::shared_ptr<Message> message;
    if (waiting.empty() || is_send == (waiting.front()->source != nullptr)) {
      message = std::make_shared<Message>();
      message->num_bytes = side.num_bytes;
      message->num_elements = side.num_elements;
      waiting.push_back(message);
    } else {
      message = waiting.front();
      if (message->dropped) {
        found.error = "rank " + std::to_string(side.peer) + " gave up";
        return;
      }
      if (!fits(*message) || message->num_elements != side.num_elements) {
        found.error = concat("rank ", rank_, " moves ", side.num_bytes, " bytes where rank ", side.peer, " moves ",
                             message->num_bytes);
        if (side.num_elements > 0) {
          found.error += concat(", of ", side.num_elements, " and ", message->num_elements, " elements");
        }
        return;
      }
      waiting.pop_front();
      message->matched = true;
      found.complete.push_back(message);
    }
    fill(*message);
    found.all.push_back(std::move(message));
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  std::vector<int> peers_;  // of begin(), ascending
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_transports(int size) {
  check_argument(size > 0, "size: expected at least 1, got ", size);
  const auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  transports.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) transports.push_back(std::make_unique<LocalTransport>(hub, rank));
  return transports;
}

}  // namespace zcomm
