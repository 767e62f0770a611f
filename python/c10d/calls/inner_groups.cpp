#include "inner_groups.hpp"

#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <utility>

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
  CombinedWork(std::vector<WorkPtr> works, std::vector<at::Tensor> results)
      : Work(-1, ::c10d::OpType::COALESCED), works_(std::move(works)), results_(std::move(results)) {}

  bool isCompleted() override {
    const auto future = existing_future();
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); }) &&
           (!future || future->completed());
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
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
    if (const auto future = existing_future()) future->wait();  // done after the works, whose threads join it
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
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = joined_future();
    return future_;
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> existing_future() {
    const std::lock_guard lock(mutex_);
    return future_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> joined_future() {
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

  std::vector<WorkPtr> works_;
  std::vector<at::Tensor> results_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // once it was asked for
};

}  // namespace

WorkPtr combine(std::vector<WorkPtr> works, std::vector<at::Tensor> results) {
  return c10::make_intrusive<CombinedWork>(std::move(works), std::move(results));
}

InnerGroups::~InnerGroups() {
  // Releases the GIL: Gloo joins its threads, which may be about to free a tensor of Python's.
  const WithoutGil no_gil;
  coalesced_.clear();
  cuda_.reset();
  cpu_.reset();
}

::c10d::Backend& InnerGroups::cuda() {
  const std::lock_guard lock(cuda_mutex_);
  if (!cuda_) {
    cuda_ = call_python(make_cuda_);
    cuda_->setGroupUid(uid_);
  }
  return *cuda_;
}

BackendPtr InnerGroups::existing_cuda() {
  const std::lock_guard lock(cuda_mutex_);
  return cuda_;
}

::c10d::Backend& InnerGroups::for_device(at::DeviceType type) {
  if (type == at::kCPU) return *cpu_;
  TORCH_CHECK_VALUE(type == at::kCUDA, "zcomm: expected a tensor on cpu or cuda, got one on ", type);
  ::c10d::Backend& inner = cuda();
  if (is_coalescing() && !coalescing_cuda_) {
    inner.startCoalescing();
    coalescing_cuda_ = true;
  }
  return inner;
}

void InnerGroups::set_group_uid(const std::string& uid) {
  {
    const std::lock_guard lock(cuda_mutex_);
    uid_ = uid;
  }
  for_each([&](::c10d::Backend& inner) { inner.setGroupUid(uid); });
}

void InnerGroups::start_coalescing() {
  coalescing_thread_ = std::this_thread::get_id();
  interrupt_coalescing();  // torch does not end a block that raised
  coalesced_.clear();
}

WorkPtr InnerGroups::end_coalescing() {
  TORCH_CHECK(is_coalescing(), "zcomm: endCoalescing was called without startCoalescing");
  interrupt_coalescing();
  coalescing_thread_ = std::thread::id();
  return combine(std::exchange(coalesced_, {}));
}

void InnerGroups::interrupt_coalescing() {
  if (is_coalescing() && std::exchange(coalescing_cuda_, false)) track(cuda().endCoalescing());
}

WorkPtr InnerGroups::track(WorkPtr work) {
  if (is_coalescing() && work) coalesced_.push_back(work);
  return work;
}

}  // namespace zcomm::c10d_binding
