// Properties and views of tensors, their memory, and properties of reduce operations.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::c10d_binding {

// Returns the core's value type, or nothing for other types. uint16 are byte pairs.
std::optional<DType> dtype_of(at::ScalarType type);
inline std::optional<DType> dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }
at::ScalarType scalar_type_of(DType dtype);

// Borrows the values of a contiguous tensor of such a type.
TensorView view_of(const at::Tensor& tensor);

// Tells whether this process has a GPU, and a torch that uses it.
bool has_gpu();
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

// Tells whether a gathered shard is the memory of this rank's slot of the output.
inline bool is_own_slot(const at::Tensor& shard, const at::Tensor& output, int rank) {
  return shard.nbytes() > 0 &&
         static_cast<const char*>(shard.data_ptr()) ==
             static_cast<const char*>(output.data_ptr()) + static_cast<std::size_t>(rank) * shard.nbytes();
}

std::int64_t elements_of(at::TensorList tensors);

// Throws ValueError that names the argument, what was given and what is needed. `wider` tells whether the shard may be
// float32 where the whole is not.
void check_shapes(at::TensorList whole, at::TensorList shard, int size, const char* whole_name, const char* shard_name,
                  bool wider = false);
// Of all calls but coalesced ones, of coalesced ones, and of lists with a tensor for each rank.
void check_one(at::TensorList tensors, const char* name = "tensor");
void check_any(at::TensorList tensors, const char* name);
void check_count(at::TensorList tensors, int size, const char* name);
void check_part(const at::Tensor& part, const at::Tensor& shard, const char* list_name, const char* shard_name);
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& shard, int size, const char* list_name,
                const char* shard_name);
void check_contiguous(const at::Tensor& tensor, const char* name, at::Device device);
// Throws ValueError for CPU tensors with strides that Gloo ignores: it takes a tensor's memory from the first value on
// as its values, and in some calls in that order.
void check_no_gaps(const at::Tensor& tensor);
void check_in_order(at::TensorList tensors, const char* name);
// Replaces inputs on CPUs that are not in order in memory, as gradients that autograd expands, by copies. Gloo would
// take other values, and ranks whose strides differ would not agree on what is compressed.
void put_in_order(std::vector<at::Tensor>& inputs);
at::Tensor in_order(const at::Tensor& input);

// --- Reduce operations

inline bool is_premul(const ::c10d::ReduceOp& op) { return op.op_ == ::c10d::ReduceOp::PREMUL_SUM; }

// Returns true if the operation is a sum over ranks, with factors.
inline bool is_linear(const ::c10d::ReduceOp& op) {
  return op.op_ == ::c10d::ReduceOp::SUM || op.op_ == ::c10d::ReduceOp::AVG || is_premul(op);
}

// Returns the factor of a linear operation. PREMUL_SUM's on a GPU is copied to the host, which blocks.
double factor_of(const ::c10d::ReduceOp& op, int size);
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

// --- Memory

// Memory of a type of device. A piece belongs to torch's current stream at acquire(), which must be the one passed to
// it; during graph capture it comes from the graph's pool.
class TorchWorkspace final : public Workspace {
 public:
  explicit TorchWorkspace(c10::DeviceType type) : allocator_(c10::GetAllocator(type)) {}

  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    return static_cast<std::byte*>(allocator_->raw_allocate(std::max<std::size_t>(num_bytes, 1)));
  }
  void release(std::byte* data, StreamView) noexcept override { allocator_->raw_deallocate(data); }

 private:
  c10::Allocator* allocator_;
};

// Returns the codec for the memory of a tensor that no communicator handles. It is never destroyed, because threads may
// use it while the process ends.
inline const Codec& codec_of(const at::Tensor& tensor) {
  static const Codec& host = *make_cpu_codec().release();
  if (tensor.is_cpu()) return host;
  static TorchWorkspace& workspace = *new TorchWorkspace(tensor.device().type());
  static const Codec& device = *make_cuda_codec(workspace).release();
  return device;
}

}  // namespace zcomm::c10d_binding
