// What the backend asks of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "policy.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm::c10d_binding {

// Empty if it is not one of a codec's value types.
std::optional<DType> dtype_of(const at::Tensor& tensor);
at::ScalarType scalar_type_of(DType dtype);

// The values of a contiguous tensor of such a type; borrows them.
TensorView view_of(const at::Tensor& tensor);
std::vector<TensorView> views_of(const std::vector<at::Tensor>& tensors);

// The slots of a tensor that is gathered or scattered whole.
std::vector<TensorView> slots_of(const at::Tensor& whole, int size);

// What the policy asks about: `whole` is the gathered, scattered or reduced tensor, given as its parts.
Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole);
Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole,
              const ::c10d::ReduceOp& op);

// True if an all-gather's input is where its output will have it.
bool is_own_slot(const at::Tensor& output, const at::Tensor& input, int rank);

// Throw ValueError that names the argument, what was given and what is needed.
void check_shapes(const at::Tensor& whole, const at::Tensor& shard, int size, const char* whole_name,
                  const char* shard_name);
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& shard, int size, const char* list_name,
                const char* shard_name);

}  // namespace zcomm::c10d_binding
