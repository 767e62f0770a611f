#include "inner_groups.hpp"

#include <utility>

#include "combined_work.hpp"
#include "gil.hpp"

namespace zcomm::c10d_binding {

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
  return combine(cpu_->getRank(), std::exchange(coalesced_, {}));
}

void InnerGroups::interrupt_coalescing() {
  if (is_coalescing() && std::exchange(coalescing_cuda_, false)) track(cuda().endCoalescing());
}

WorkPtr InnerGroups::track(WorkPtr work) {
  if (is_coalescing() && work) coalesced_.push_back(work);
  return work;
}

}  // namespace zcomm::c10d_binding
