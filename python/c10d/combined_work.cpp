#include "combined_work.hpp"

#include <ATen/core/ivalue_inl.h>

#include <algorithm>

namespace zcomm::c10d_binding {
namespace {

// Flattens values of Gloo's futures: lists of tensors, or lists of these.
void append(c10::List<at::Tensor>& tensors, const c10::IValue& value) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) append(tensors, item);
  }
}

class CombinedWork final : public ::c10d::Work {
 public:
  CombinedWork(int rank, std::vector<WorkPtr> works, std::vector<at::Tensor> results)
      : Work(rank, ::c10d::OpType::COALESCED), works_(std::move(works)), results_(std::move(results)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) return error;
    }
    return nullptr;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool all = true;
    for (const auto& work : works_) all = work->wait(timeout) && all;
    return all;
  }
  void abort() override {
    for (const auto& work : works_) work->abort();
  }
  std::vector<at::Tensor> result() override {
    if (!results_.empty()) return results_;
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      const auto part = work->result();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto type = c10::FutureType::create(c10::AnyType::get());
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(type);
    for (const auto& work : works_) futures.push_back(work->getFuture());
    // Joins their tensors into one list, as in the future of a single call.
    return c10::collectAll(futures)->then(
        [futures, results = results_](c10::ivalue::Future&) {
          c10::List<at::Tensor> tensors;
          for (const c10::intrusive_ptr<c10::ivalue::Future> future : futures) {
            append(tensors, future->value());  // throws the error of a call that failed
          }
          return c10::IValue(results.empty() ? tensors : c10::List<at::Tensor>(results));
        },
        c10::ListType::ofTensors());
  }

 private:
  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> results_;
};

}  // namespace

WorkPtr combine(int rank, std::vector<WorkPtr> works, std::vector<at::Tensor> results) {
  return c10::make_intrusive<CombinedWork>(rank, std::move(works), std::move(results));
}

}  // namespace zcomm::c10d_binding
