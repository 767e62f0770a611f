#include "work.hpp"

#include <ATen/core/ivalue_inl.h>

#include <algorithm>

namespace zcomm::c10d_binding {

CompressedWork::CompressedWork(int rank, ::c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
                               std::vector<at::Tensor> outputs, std::uint64_t sequence_number)
    : Work(rank, type, title, inputs),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      sequence_number_(sequence_number) {}

void CompressedWork::complete(std::exception_ptr error) {
  inputs_.clear();
  finish(error);  // first: callbacks of the future may look at this work
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

CombinedWork::CombinedWork(int rank, std::vector<c10::intrusive_ptr<::c10d::Work>> works)
    : Work(rank, ::c10d::OpType::COALESCED), works_(std::move(works)) {}

bool CombinedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CombinedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CombinedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

void CombinedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

bool CombinedWork::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& work : works_) all = work->wait(timeout) && all;
  return all;
}

void CombinedWork::abort() {
  for (const auto& work : works_) work->abort();
}

std::vector<at::Tensor> CombinedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto part = work->result();
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> CombinedWork::getFuture() {
  const auto type = c10::FutureType::create(c10::AnyType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(type);
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures);
}

}  // namespace zcomm::c10d_binding
