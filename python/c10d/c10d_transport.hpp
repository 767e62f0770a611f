// Bytes <-> ranks over the send and recv of a c10d process group: Gloo's, on a CPU.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "zcomm/call_check.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

class C10dTransport final : public Transport {
 public:
  // `group` is this transport's own, so that its messages never meet others. `store` carries the reason of a failure to
  // the peers.
  C10dTransport(c10::intrusive_ptr<::c10d::Backend> group, c10::intrusive_ptr<::c10d::Store> store);

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout) override;
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView stream) override;
  void abort(const std::string& reason) noexcept override;

  struct Pending {
    c10::intrusive_ptr<::c10d::Work> work;
    int peer;
  };
  // Blocks until all are done; then, once per call, compares what the peers call.
  void wait(std::vector<Pending>& pending);

 private:
  std::vector<Pending> post(std::span<const Send> sends, std::span<const Recv> recvs);
  void finish_check();
  void wait_posted(std::vector<Pending>& pending);
  void close_connections() noexcept;
  std::string failure_of_peers() noexcept;

  c10::intrusive_ptr<::c10d::Backend> group_;
  c10::intrusive_ptr<::c10d::Store> store_;
  // Messages between two ranks match in order, so both ends count them. The tag joins the count and the call: Gloo ends
  // the process where two messages of different size meet, so those of different calls must not meet.
  int tag_of(int count) const { return call_tag_ ^ count; }
  int call_tag_ = 0;
  std::vector<int> num_sent_;
  std::vector<int> num_received_;
  std::chrono::steady_clock::time_point deadline_;
  std::chrono::milliseconds timeout_{0};
  std::optional<CallCheck> check_;  // of the current call, until verified
  std::vector<Pending> check_messages_;

  std::mutex mutex_;  // of aborted_
  std::optional<std::string> aborted_;
};

}  // namespace zcomm::c10d_binding
