// A transport over the memory channels, in memory that ranks of this process share.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "transport/memory_channels.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/error.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::test {

struct alignas(64) Line {
  std::byte bytes[64];
};

// Outboxes in memory of this process.
struct Memory {
  explicit Memory(int size) {
    const std::size_t lines = (MemoryChannels::outbox_bytes(size) + sizeof(Line) - 1) / sizeof(Line);
    for (int rank = 0; rank < size; ++rank) outboxes.emplace_back(new Line[lines]());
  }
  std::unique_ptr<MemoryChannels> channels(int rank) const {
    std::vector<std::byte*> places;
    for (const auto& outbox : outboxes) places.push_back(outbox[0].bytes);
    return std::make_unique<MemoryChannels>(places, rank);
  }
  std::vector<std::unique_ptr<Line[]>> outboxes;
};

// Every message goes through memory, whatever the topology: the nodes of its ranks decide only about hops.
class MemoryTransport final : public Transport {
 public:
  MemoryTransport(std::shared_ptr<const Memory> memory, int rank)
      : memory_(std::move(memory)), rank_(rank), channels_(memory_->channels(rank)) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(memory_->outboxes.size()); }
  void begin(const std::string& call, std::span<const int>, std::chrono::milliseconds timeout, StreamView) override {
    tag_ = static_cast<std::uint32_t>(call_fingerprint(call));
    deadline_ = std::chrono::steady_clock::now() + timeout;
  }
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView) override {
    auto moving = std::make_unique<Moving>(*this);
    for (const Recv& recv : recvs) {
      if (recv.num_bytes > 0)
        channels_->recv(recv.peer, recv.data, recv.num_bytes, recv.is_upper_bound, tag_, moving->batch, recv.place);
    }
    for (const Send& send : sends) {
      if (send.num_bytes > 0) channels_->send({&send.peer, 1}, send.data, send.num_bytes, {&tag_, 1}, moving->batch);
    }
    channels_->progress();
    return moving;
  }
  void abort(const std::string& reason) noexcept override { channels_->fail(reason); }

 private:
  struct Moving final : Transfer {
    explicit Moving(MemoryTransport& transport) : transport(transport) {}
    ~Moving() override { transport.channels_->drop(batch); }
    void wait(StreamView) override {
      while (!transport.channels_->wait(batch, std::chrono::milliseconds(10))) {
        if (const int peer = transport.channels_->find_failed(batch); peer >= 0)
          throw TransportError(transport.channels_->reason_of(peer));
        if (std::chrono::steady_clock::now() > transport.deadline_) throw TimeoutError("too late");
      }
    }
    MemoryTransport& transport;
    MemoryChannels::Batch batch = 0;
  };

  const std::shared_ptr<const Memory> memory_;
  const int rank_;
  const std::unique_ptr<MemoryChannels> channels_;
  std::uint32_t tag_ = 0;
  std::chrono::steady_clock::time_point deadline_;
};

}  // namespace zcomm::test
