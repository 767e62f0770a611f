#include "reduce_op.hpp"

#include <ATen/ATen.h>

namespace zcomm::c10d_binding {

bool is_linear(const ::c10d::ReduceOp& op) {
  return op.op_ == ::c10d::ReduceOp::SUM || op.op_ == ::c10d::ReduceOp::AVG || is_premul(op);
}

double factor_of(const ::c10d::ReduceOp& op, int size) {
  if (op.op_ == ::c10d::ReduceOp::AVG) return 1.0 / size;
  if (!is_premul(op)) return 1.0;
  const auto* supplement = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(tensor * factor);
  return results;
}

void scale_in_place(std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& tensor : tensors) tensor.mul_(factor);
}

}  // namespace zcomm::c10d_binding
