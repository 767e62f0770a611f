#include <algorithm>
#include <numeric>

#include "zcomm/checked_transport.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lossless.hpp"

namespace zcomm {

// The hash of differences pads values, so the length counts apart from it, and so does an odd byte.
std::uint64_t checksum(const std::byte* data, std::size_t num_bytes) {
  static const HostLosslessCodec codec;
  const auto num_pairs = static_cast<std::int64_t>(num_bytes / 2);
  const auto odd = num_bytes % 2 == 0 ? 0u : std::to_integer<std::uint64_t>(data[num_bytes - 1]);
  return codec.hash({data, num_pairs, DType::bfloat16}) + (num_bytes << 8 | odd) * 0x9e3779b97f4a7c15;
}

namespace {

struct Sum {
  std::uint64_t value = 0;
  std::uint64_t num_bytes = 0;  // of the message
};

// Returns the numbers of the messages that move and have checksums, by peer, each peer's in their order.
template <class Messages>
std::vector<std::size_t> order_of(const Messages& messages, const std::vector<bool>& is_checked) {
  std::vector<std::size_t> order(messages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t i) {
    return messages[i].num_bytes == 0 || !is_checked[static_cast<std::size_t>(messages[i].peer)];
  });
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return messages[i].peer; });
  return order;
}

// Appends a message to or from each peer: its part of `sums`, which have this order.
template <class Message>
void add_sums(std::vector<Message>& messages, const std::vector<std::size_t>& order, std::vector<Sum>& sums) {
  for (std::size_t first = 0; first < order.size();) {
    const int peer = messages[order[first]].peer;
    std::size_t end = first;
    while (end < order.size() && messages[order[end]].peer == peer) ++end;
    Message message;
    message.peer = peer;
    message.data = reinterpret_cast<std::byte*>(&sums[first]);
    message.num_bytes = (end - first) * sizeof(Sum);
    messages.push_back(message);
    first = end;
  }
}

class CheckedTransport final : public Transport {
 public:
  CheckedTransport(std::unique_ptr<Transport> inner, std::uint64_t every)
      : inner_(std::move(inner)),
        every_(every),
        num_calls_(static_cast<std::size_t>(inner_->size())),
        is_checked_(num_calls_.size(), true) {
    check_argument(!inner_->is_stream_ordered(), "inner: expected a transport on the host, got one of a GPU");
    check_argument(every > 0, "every: expected at least 1, got 0");
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
             StreamView stream) override {
    num_transfers_ = 0;
    for (const int rank : peers) {  // other ranks may not be in this call
      const auto peer = static_cast<std::size_t>(rank);
      // Of `every` calls another one than before, so that all calls of a step have their turn.
      is_checked_[peer] = num_calls_[peer] % every_ == num_calls_[peer] / every_ % every_;
      ++num_calls_[peer];
    }
    inner_->begin(call, peers, timeout, stream);
  }

  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                  StreamView stream) override {
    const std::vector<std::size_t> order = order_of(sends, is_checked_);
    std::vector<std::size_t> order_of_recvs = order_of(recvs, is_checked_);
    if (order.empty() && order_of_recvs.empty()) return inner_->start(sends, recvs, stream);
    auto transfer = std::make_unique<CheckedTransfer>(num_transfers_++, recvs, std::move(order_of_recvs));
    std::vector<Send> sent(sends.begin(), sends.end());
    std::vector<Sum>& sums = transfer->sent;
    sums.resize(order.size());
    const Send* last = nullptr;  // what goes to several ranks is summed once, if it is the only message to each
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Send& send = sends[order[i]];
      const bool is_same = last != nullptr && send.data == last->data && send.num_bytes == last->num_bytes;
      sums[i] = is_same ? sums[i - 1] : Sum{checksum(send.data, send.num_bytes), send.num_bytes};
      last = &send;
    }
    add_sums(sent, order, sums);
    std::vector<Recv> received = transfer->recvs;
    add_sums(received, transfer->order, transfer->sums);
    transfer->inner = inner_->start(sent, received, stream);
    return transfer;
  }

  void begin_group() override { inner_->begin_group(); }
  void end_group(StreamView stream) override { inner_->end_group(stream); }
  void check() override { inner_->check(); }
  void watch(DeferredCheck finding) override { inner_->watch(std::move(finding)); }
  void finish() noexcept override { inner_->finish(); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  struct CheckedTransfer final : Transfer {
    CheckedTransfer(int its_number, std::span<const Recv> its_recvs, std::vector<std::size_t> its_order)
        : number(its_number),
          recvs(its_recvs.begin(), its_recvs.end()),
          order(std::move(its_order)),
          sums(order.size()) {}

    void wait(StreamView stream) override {
      inner->wait(stream);
      for (std::size_t i = 0; i < order.size(); ++i) check(recvs[order[i]], sums[i], order[i]);
    }
    void check(const Recv& recv, const Sum& sum, std::size_t message) const {
      const std::byte* data = recv.place != nullptr ? *recv.place : recv.data;
      const bool has_length = recv.is_upper_bound ? sum.num_bytes <= recv.num_bytes : sum.num_bytes == recv.num_bytes;
      if (has_length && checksum(data, sum.num_bytes) == sum.value) return;
      throw CorruptedWireError(concat("corrupted bytes from rank ", recv.peer, ": message ", message, " of transfer ",
                                      number, ", of ", recv.num_bytes,
                                      " bytes, has another checksum than when it was sent"));
    }

    const int number;  // in its call
    const std::vector<Recv> recvs;
    const std::vector<std::size_t> order;  // of `recvs`
    std::vector<Sum> sums;                 // that arrive, in this order
    std::vector<Sum> sent;
    std::unique_ptr<Transfer> inner;  // first to go: it borrows the memory above
  };

  const std::unique_ptr<Transport> inner_;
  const std::uint64_t every_;
  std::vector<std::uint64_t> num_calls_;  // with each rank
  std::vector<bool> is_checked_;          // the call in progress, with each rank
  int num_transfers_ = 0;                 // of the call
};

}  // namespace

std::unique_ptr<Transport> make_checked_transport(std::unique_ptr<Transport> inner, std::uint64_t every) {
  return std::make_unique<CheckedTransport>(std::move(inner), every);
}

}  // namespace zcomm
