// Work of a compressed collective on CPU tensors.
#pragma once

#include "job.hpp"

namespace zcomm::c10d_binding {

// Holds inputs and outputs until the job is complete.
class HostWork final : public ::c10d::Work {
 public:
  // Takes the `queue` that runs the job: see HostRunner::advance_inside_callback.
  HostWork(const Job& job, const void* queue);

  // Marks the work as done, or as failed with `error`. Called once.
  void complete(std::exception_ptr error);

  // Runs the job itself inside of a callback, where no other thread may be able to.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  const void* queue_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::uint64_t sequence_number_;
};

}  // namespace zcomm::c10d_binding
