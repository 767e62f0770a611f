// Completion of compressed collectives.
#pragma once

#include "runner.hpp"

namespace zcomm::c10d_binding {

// One compressed collective on CPU tensors. Holds inputs and outputs until it is complete.
class HostWork final : public ::c10d::Work {
 public:
  explicit HostWork(const Job& job);

  // Marks it done, or failed with `error`. Called once.
  void complete(std::exception_ptr error);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint64_t sequence_number_;
};

// Several works that the caller sees as one.
class CombinedWork final : public ::c10d::Work {
 public:
  CombinedWork(int rank, std::vector<c10::intrusive_ptr<::c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
};

}  // namespace zcomm::c10d_binding
