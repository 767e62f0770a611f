#include "host_work.hpp"

#include <ATen/core/ivalue_inl.h>

#include "host_runner.hpp"

namespace zcomm::c10d_binding {

// Records no range for an asynchronous job: it would end after the profiler may have stopped and freed its memory.
HostWork::HostWork(const Job& job, const void* queue)
    : Work(-1, job.type, job.async ? nullptr : job.title, job.inputs),
      queue_(queue),
      inputs_(job.inputs),
      outputs_(job.outputs),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      sequence_number_(job.sequence_number) {}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  while (!isCompleted() && HostRunner::advance_inside_callback(queue_)) {
  }
  return Work::wait(timeout);
}

void HostWork::complete(std::exception_ptr error) {
  inputs_.clear();
  finish(error);  // first: callbacks of the future may query this work
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace zcomm::c10d_binding
