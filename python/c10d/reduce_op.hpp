// Properties of reduce operations.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace zcomm::c10d_binding {

// Returns true if the operation is a sum over ranks, with factors.
bool is_linear(const ::c10d::ReduceOp& op);
// Returns the factor of a linear operation. PREMUL_SUM's on a GPU is copied to the host, which blocks.
double factor_of(const ::c10d::ReduceOp& op, int size);

inline bool is_premul(const ::c10d::ReduceOp& op) { return op.op_ == ::c10d::ReduceOp::PREMUL_SUM; }
std::vector<at::Tensor> scaled(const std::vector<at::Tensor>& tensors, double factor);
void scale_in_place(std::vector<at::Tensor>& tensors, double factor);

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
