// Transport for tests of what NCCL's does not do or know.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/error.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::test {

// Transport that compares no calls, as NCCL's those that it has seen, and can change the messages that it sends.
class Unchecked final : public Transport {
 public:
  using Change = std::function<void(std::vector<std::byte>&)>;
  explicit Unchecked(std::unique_ptr<Transport> inner, Change change = nullptr, bool is_stream_ordered = false)
      : inner_(std::move(inner)), change_(std::move(change)), is_stream_ordered_(is_stream_ordered) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void begin(const std::string&, std::span<const int>, std::chrono::milliseconds timeout, StreamView) override {
    inner_->begin("", {}, timeout);
  }
  bool is_stream_ordered() const override { return is_stream_ordered_; }
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs,
                                  StreamView stream) override {
    for (const Recv& recv : recvs) {
      if (recv.is_upper_bound && is_stream_ordered_) throw Error("a size that is not known");
    }
    std::vector<Send> changed(sends.begin(), sends.end());
    for (Send& send : changed) {
      sent_.push_back(std::make_unique<std::vector<std::byte>>(send.data, send.data + send.num_bytes));
      if (change_) change_(*sent_.back());
      send.data = sent_.back()->data();
      send.num_bytes = sent_.back()->size();
    }
    return inner_->start(changed, recvs, stream);
  }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  std::unique_ptr<Transport> inner_;
  Change change_;
  bool is_stream_ordered_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> sent_;
};

}  // namespace zcomm::test
