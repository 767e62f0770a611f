// Properties of reduce operations.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace zcomm::c10d_binding {

inline bool is_premul(const ::c10d::ReduceOp& op) { return op.op_ == ::c10d::ReduceOp::PREMUL_SUM; }

// Returns true if the operation is a sum over ranks, with factors.
inline bool is_linear(const ::c10d::ReduceOp& op) {
  return op.op_ == ::c10d::ReduceOp::SUM || op.op_ == ::c10d::ReduceOp::AVG || is_premul(op);
}

// Returns the factor of a linear operation. PREMUL_SUM's on a GPU is copied to the host, which blocks.
inline double factor_of(const ::c10d::ReduceOp& op, int size) {
  if (op.op_ == ::c10d::ReduceOp::AVG) return 1.0 / size;
  if (!is_premul(op)) return 1.0;
  const auto* supplement = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

inline std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) results.push_back(tensor * factor);
  return results;
}

inline void scale_in_place(std::vector<at::Tensor>& tensors, double factor) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& tensor : tensors) tensor.mul_(factor);
}

template <class CallOptions>
CallOptions as_sum(CallOptions opts) {
  opts.reduceOp = ::c10d::ReduceOp::SUM;
  return opts;
}

// Tells whether the exact path must scale before it sums: Gloo has no PREMUL_SUM.
inline bool needs_premul_emulation(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  return is_premul(op) && tensor.device().is_cpu();
}

}  // namespace zcomm::c10d_binding
