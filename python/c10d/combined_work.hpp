// Several works, seen as one by the caller.
#pragma once

#include <vector>

#include "pointers.hpp"

namespace zcomm::c10d_binding {

class CombinedWork final : public ::c10d::Work {
 public:
  CombinedWork(int rank, std::vector<WorkPtr> works);

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
};

}  // namespace zcomm::c10d_binding
