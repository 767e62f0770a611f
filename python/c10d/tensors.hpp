// Properties and views of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "policy.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"

namespace zcomm::c10d_binding {

// Returns the core's value type, or nothing for other types. uint16 are byte pairs.
std::optional<DType> dtype_of(at::ScalarType type);
inline std::optional<DType> dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }
at::ScalarType scalar_type_of(DType dtype);

// Borrows the values of a contiguous tensor of such a type.
TensorView view_of(const at::Tensor& tensor);

// Returns torch's current stream of a GPU.
c10::Stream current_stream(at::Device device);
// Returns the same for the core; none of a CPU.
StreamView current_view(at::Device device);

// Appends the slots' segments, slot after slot, of tensors that each have one segment of all slots.
template <class Views>
void add_segments(Views& views, const std::vector<at::Tensor>& tensors, int size) {
  for (int rank = 0; rank < size; ++rank) {
    for (const at::Tensor& tensor : tensors) {
      const std::int64_t count = tensor.numel() / size;
      views.push_back(view_of(tensor).slice(rank * count, count));
    }
  }
}

// Describes a call for the policy; `whole` is the gathered, scattered or reduced tensor, in parts.
Call describe(Collective collective, Form form, const at::Tensor& shard, std::span<const at::Tensor> whole,
              const ::c10d::ReduceOp& op = ::c10d::ReduceOp::SUM);

std::int64_t elements_of(at::TensorList tensors);

// Throws ValueError that names the argument, what was given and what is needed. `wider` tells whether the shard may be
// float32 where the whole is not.
void check_shapes(at::TensorList whole, at::TensorList shard, int size, const char* whole_name, const char* shard_name,
                  bool wider = false);
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& shard, int size, const char* list_name,
                const char* shard_name);
void check_contiguous(const at::Tensor& tensor, const char* name, at::Device device);
// Throws ValueError for CPU tensors with strides that Gloo ignores: it takes a tensor's memory from the first value on
// as its values, and in some calls in that order.
void check_no_gaps(const at::Tensor& tensor);
void check_in_order(at::TensorList tensors, const char* name);

}  // namespace zcomm::c10d_binding
