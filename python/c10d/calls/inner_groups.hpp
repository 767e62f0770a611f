// Inner groups: torch's own groups, Gloo and for GPU tensors NCCL, which carry the exact calls.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "c10d/base/python_hooks.hpp"
#include "c10d/job/call_hooks.hpp"
#include "c10d/job/flight_recorder.hpp"

namespace zcomm::c10d_binding {

// Joins works into one. Takes the caller's tensors in its order; without any, the results are those of the works, in
// their order.
WorkPtr combine(std::vector<WorkPtr> works, std::vector<at::Tensor> results = {});

// Call of an inner group, with the tensors that hooks see. Borrows them.
struct InnerCall {
  RecordedCall recorded;
  at::Device device;
  at::TensorList inputs = {};
  at::TensorList outputs = {};
  std::string_view verdict = "other";  // why it is exact: here, as it is never compressed
};

class InnerGroups {
 public:
  // Takes `make_cuda`, which is called once, at the first exact call on "cuda" tensors. Borrows the other two.
  InnerGroups(BackendPtr cpu, std::function<BackendPtr()> make_cuda, GroupRecorder& recorder, const CallHooks& hooks)
      : cpu_(std::move(cpu)), make_cuda_(std::move(make_cuda)), recorder_(recorder), hooks_(hooks) {}
  ~InnerGroups();

  const CallHooks& hooks() const { return hooks_; }
  ::c10d::Backend& cpu() { return *cpu_; }
  ::c10d::Backend& cuda();
  // Returns the group for tensors of a type. Tells it about coalescing if calls are being coalesced.
  ::c10d::Backend& for_device(at::DeviceType type);

  // Calls start(inner group) and tracks its work: works of calls that NCCL coalesces come at their end.
  template <class Start>
  WorkPtr forward(at::Device device, Start&& start) {
    WorkPtr work = start(for_device(device.type()));
    return device.is_cpu() ? track(std::move(work)) : work;
  }

  // The same for a call that hooks see, and that is recorded unless the inner group refuses it. The end of a GPU call
  // is not recorded.
  template <class Start>
  WorkPtr forward(const InnerCall& call, Start&& start) {
    const HookedCallPtr hooked = hooks_.begin(call.recorded.name, call.verdict, call.inputs, call.outputs);
    const std::uint64_t record = recorder_.begin(call.recorded);
    WorkPtr work;
    try {
      work = forward(call.device, [&](::c10d::Backend& inner) {
        WorkPtr begun = start(inner);
        return call.device.is_cpu() ? GroupRecorder::follow(record, std::move(begun)) : begun;
      });
    } catch (const std::exception&) {
      recorder_.take_back(record, call.recorded);
      throw;
    }
    CallHooks::end(hooked, work);
    return work;
  }

  template <class Start>
  WorkPtr forward(const Request& request, Start&& start) {
    const InnerCall call{recorded_call(request), request.device(), request.inputs, request.outputs,
                         to_string(request.verdict)};
    return forward(call, start);
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
  const CallHooks& hooks_;
  std::mutex cuda_mutex_;  // guards the next two
  BackendPtr cuda_;
  std::string uid_;
  std::atomic<std::thread::id> coalescing_thread_{};  // alone uses the next two
  bool coalescing_cuda_ = false;                      // the inner group has been told
  std::vector<WorkPtr> coalesced_;
};

}  // namespace zcomm::c10d_binding
