#include "host_work.hpp"

#include <ATen/core/ivalue_inl.h>

namespace zcomm::c10d_binding {

HostWork::HostWork(const Job& job)
    : Work(-1, job.type, job.title, job.inputs),
      inputs_(job.inputs),
      outputs_(job.outputs),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      sequence_number_(job.sequence_number) {}

void HostWork::complete(std::exception_ptr error) {
  inputs_.clear();
  finish(error);  // first: callbacks of the future may look at this work
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace zcomm::c10d_binding
