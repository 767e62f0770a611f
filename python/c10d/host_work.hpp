// A compressed collective on CPU tensors, as its caller sees it.
#pragma once

#include "job.hpp"

namespace zcomm::c10d_binding {

// Holds inputs and outputs until it is complete.
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

}  // namespace zcomm::c10d_binding
