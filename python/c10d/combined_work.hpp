// Several works, seen as one by the caller.
#pragma once

#include <vector>

#include "pointers.hpp"

namespace zcomm::c10d_binding {

class CombinedWork final : public ::c10d::Work {
 public:
  // Takes the caller's tensors in its order; without any, the results are those of the works, in their order.
  CombinedWork(int rank, std::vector<WorkPtr> works, std::vector<at::Tensor> results = {});

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> results_;
};

}  // namespace zcomm::c10d_binding
