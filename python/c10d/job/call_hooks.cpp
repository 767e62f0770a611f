#include "call_hooks.hpp"

#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "flight_recorder.hpp"
#include "job.hpp"

namespace zcomm::c10d_binding {
namespace {

namespace py = pybind11;

std::atomic<bool> has_function{false};

// Never destroyed: threads of a group may end after Python has.
py::object& function_of_process() {
  static auto* const function = new py::object;
  return *function;
}

void call_function(const char* phase, const HookedCallPtr& call, const auto& detail) {
  const py::gil_scoped_acquire gil;
  const py::object function = function_of_process();
  if (has_function) function(phase, call, detail);
}

}  // namespace

void CallHooks::set(py::object function) {
  has_function = !function.is_none();
  function_of_process() = std::move(function);
}

void CallHooks::abort(const std::string& group, const std::string& error) noexcept {
  if (!has_function || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  try {
    auto call = std::make_shared<HookedCall>();
    call->group = group;
    call_function("abort", call, error);
  } catch (py::error_already_set& raised) {
    raised.discard_as_unraisable("a hook of zcomm.register_hook(abort=...)");
  } catch (const std::exception&) {  // no memory is left
  }
}

HookedCallPtr CallHooks::begin(std::string_view collective, std::string_view verdict, at::TensorList inputs,
                               at::TensorList outputs) const {
  if (!has_function) return nullptr;
  auto call = std::make_shared<HookedCall>();
  call->group = group_.getGroupUid();
  call->collective = collective;
  call->verdict = verdict;
  call->inputs = inputs.vec();
  call->outputs = outputs.vec();
  call_function("pre", call, py::none());
  return call;
}

void CallHooks::end(const HookedCallPtr& call, const WorkPtr& work) {
  if (call) call_function("post", call, work);
}

std::shared_ptr<void> CallHooks::begin(Job& job) {
  if (!has_function || job.settings.rehearsal) return nullptr;
  auto call = std::make_shared<HookedCall>();
  call->group = group_.getGroupUid();
  call->collective = recorded_call(job).name;
  call->verdict = to_string(Verdict::compressed);
  call->inputs = job.inputs;
  call->outputs = job.outputs;
  call->description = job.operation->description();
  if (job.site) call->site = job.site->name;
  call->bytes = job.operation->bytes(job.arguments());
  call_function("pre", call, py::none());
  return call;
}

}  // namespace zcomm::c10d_binding
