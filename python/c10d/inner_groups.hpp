// torch's own groups, which carry the calls that stay exact: Gloo, and NCCL for tensors on a GPU.
#pragma once

#include <mutex>

#include "flight_recorder.hpp"
#include "python_hooks.hpp"

namespace zcomm::c10d_binding {

class InnerGroups {
 public:
  // `make_cuda` is called once, at the first exact call on "cuda" tensors.
  // `recorder` outlives this.
  InnerGroups(BackendPtr cpu, std::function<BackendPtr()> make_cuda, GroupRecorder& recorder)
      : cpu_(std::move(cpu)), make_cuda_(std::move(make_cuda)), recorder_(recorder) {}
  ~InnerGroups();

  ::c10d::Backend& cpu() { return *cpu_; }
  ::c10d::Backend& cuda();
  // That for tensors of a type. While calls are coalesced it is told so.
  ::c10d::Backend& for_device(at::DeviceType type);

  // call(inner group), tracked: a work of calls that NCCL coalesces comes at their end.
  template <class InnerCall>
  WorkPtr forward(at::DeviceType type, InnerCall&& call) {
    WorkPtr work = call(for_device(type));
    return type == at::kCPU ? track(std::move(work)) : work;
  }
  template <class InnerCall>
  WorkPtr forward(const at::Tensor& tensor, InnerCall&& call) {
    return forward(tensor.device().type(), std::forward<InnerCall>(call));
  }

  // The same, recorded. On a GPU its end is not.
  template <class InnerCall>
  WorkPtr forward(const RecordedCall& recorded, at::DeviceType type, InnerCall&& call) {
    const std::uint64_t record = recorder_.begin(recorded);
    return forward(type, [&](::c10d::Backend& inner) {
      WorkPtr work = call(inner);
      return type == at::kCPU ? GroupRecorder::follow(record, std::move(work)) : work;
    });
  }
  template <class InnerCall>
  WorkPtr forward(const RecordedCall& recorded, const at::Tensor& tensor, InnerCall&& call) {
    return forward(recorded, tensor.device().type(), std::forward<InnerCall>(call));
  }

  // Applies `visit` to the groups that are there.
  template <class Visit>
  void for_each(Visit&& visit) {
    visit(*cpu_);
    if (const BackendPtr cuda = existing_cuda()) visit(*cuda);
  }
  void set_group_uid(const std::string& uid);

  // NCCL's calls become one; Gloo has no groups of calls, and compressed ones start at once. The caller gets one work
  // for all of them.
  void start_coalescing();
  WorkPtr end_coalescing();
  bool is_coalescing() const { return coalescing_; }
  // Remembers `work` for the end of the coalesced calls, if there are any.
  WorkPtr track(WorkPtr work);

 private:
  BackendPtr existing_cuda();

  BackendPtr cpu_;
  std::function<BackendPtr()> make_cuda_;
  GroupRecorder& recorder_;
  std::mutex cuda_mutex_;  // of the two below
  BackendPtr cuda_;
  std::string uid_;
  bool coalescing_ = false;
  bool coalescing_cuda_ = false;  // the inner group has been told
  std::vector<WorkPtr> coalesced_;
};

}  // namespace zcomm::c10d_binding
