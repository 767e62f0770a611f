// Inner groups: torch's own groups, Gloo and for GPU tensors NCCL, which carry the exact calls.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "c10d/base/python_hooks.hpp"
#include "c10d/job/flight_recorder.hpp"

namespace zcomm::c10d_binding {

// Joins works into one. Takes the caller's tensors in its order; without any, the results are those of the works, in
// their order.
WorkPtr combine(std::vector<WorkPtr> works, std::vector<at::Tensor> results = {});

class InnerGroups {
 public:
  // Takes `make_cuda`, which is called once, at the first exact call on "cuda" tensors. Borrows `recorder`.
  InnerGroups(BackendPtr cpu, std::function<BackendPtr()> make_cuda, GroupRecorder& recorder)
      : cpu_(std::move(cpu)), make_cuda_(std::move(make_cuda)), recorder_(recorder) {}
  ~InnerGroups();

  ::c10d::Backend& cpu() { return *cpu_; }
  ::c10d::Backend& cuda();
  // Returns the group for tensors of a type. Tells it about coalescing if calls are being coalesced.
  ::c10d::Backend& for_device(at::DeviceType type);

  // Calls call(inner group) and tracks its work: works of calls that NCCL coalesces come at their end.
  template <class InnerCall>
  WorkPtr forward(at::Device device, InnerCall&& call) {
    WorkPtr work = call(for_device(device.type()));
    return device.is_cpu() ? track(std::move(work)) : work;
  }

  // Calls call(inner group) and records it, unless the inner group refuses it. The end of a GPU call is not recorded.
  template <class InnerCall>
  WorkPtr forward(const RecordedCall& recorded, at::Device device, InnerCall&& call) {
    const std::uint64_t record = recorder_.begin(recorded);
    try {
      return forward(device, [&](::c10d::Backend& inner) {
        WorkPtr work = call(inner);
        return device.is_cpu() ? GroupRecorder::follow(record, std::move(work)) : work;
      });
    } catch (const std::exception&) {
      recorder_.take_back(record, recorded);
      throw;
    }
  }

  // The same for a call on the device of its inputs.
  template <class InnerCall>
  WorkPtr forward(const char* name, at::TensorList inputs, at::TensorList outputs, std::chrono::milliseconds timeout,
                  InnerCall&& call) {
    return forward(recorded_call(name, inputs, outputs, timeout), inputs[0].device(), call);
  }

  template <class InnerCall>
  WorkPtr forward(const Request& request, InnerCall&& call) {
    return forward(recorded_call(request), request.device(), call);
  }

  // Calls `visit` with each existing group.
  template <class Visit>
  void for_each(Visit&& visit) {
    visit(*cpu_);
    if (const BackendPtr cuda = existing_cuda()) visit(*cuda);
  }
  void set_group_uid(const std::string& uid);

  // Begins coalescing of this thread's calls: NCCL's become one; Gloo has no groups of calls, and compressed ones start
  // at once. The caller gets one work for all.
  void start_coalescing();
  WorkPtr end_coalescing();
  bool is_coalescing() const { return coalescing_thread_.load() == std::this_thread::get_id(); }
  // Sends NCCL's calls so far, if they are being coalesced. NCCL would delay a compressed call that is made in between
  // to the end of its group.
  void interrupt_coalescing();
  // Keeps an unfinished `work` for the end of coalesced calls, if any.
  WorkPtr track(WorkPtr work);

 private:
  BackendPtr existing_cuda();

  BackendPtr cpu_;
  std::function<BackendPtr()> make_cuda_;
  GroupRecorder& recorder_;
  std::mutex cuda_mutex_;  // guards the next two
  BackendPtr cuda_;
  std::string uid_;
  std::atomic<std::thread::id> coalescing_thread_{};  // alone uses the next two
  bool coalescing_cuda_ = false;                      // the inner group has been told
  std::vector<WorkPtr> coalesced_;
};

}  // namespace zcomm::c10d_binding
