#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "host_torch.hpp"

namespace cuda_host::torch {
namespace {

struct Piece {
  void* data;
  std::size_t num_bytes;
  std::int64_t stream;
  bool captured;  // belongs to a graph, for good
};

std::mutex mutex;  // of all below
std::multimap<std::pair<std::int64_t, std::size_t>, Piece*> idle;
std::map<void*, Piece*> live;
std::int64_t num_made = 0;
std::int64_t bytes_made = 0;
std::int64_t memory_limit = -1;  // of bytes_made; negative: none

void free_piece(void* data) {
  const std::lock_guard lock(mutex);
  const auto found = live.find(data);
  Piece* const piece = found->second;
  live.erase(found);
  if (!piece->captured) idle.emplace(std::pair(piece->stream, piece->num_bytes), piece);
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    const std::int64_t owner = current_stream();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    TORCH_CHECK(cudaStreamIsCapturing(stream(owner), &status) == cudaSuccess);
    const bool captured = status != cudaStreamCaptureStatusNone;
    const std::lock_guard lock(mutex);
    Piece* piece = nullptr;
    const auto found = idle.find({owner, num_bytes});
    if (found != idle.end() && !captured) {
      piece = found->second;
      idle.erase(found);
    } else {
      const auto bytes = static_cast<std::int64_t>(num_bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, memory_limit < 0 || bytes_made + bytes <= memory_limit,
                       "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
      ++num_made;
      bytes_made += bytes;
      piece = new Piece{::operator new(num_bytes, std::align_val_t{512}), num_bytes, owner, captured};
    }
    live.emplace(piece->data, piece);
    return {piece->data, piece->data, &free_piece, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_piece; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

HostAllocator allocator;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator, keys, dtype.value_or(at::kFloat), format);
}

// `tensor` is contiguous.
at::Tensor& zero(at::Tensor& tensor) {
  TORCH_CHECK(cudaMemsetAsync(tensor.data_ptr(), 0, tensor.nbytes(), stream(current_stream())) == cudaSuccess);
  return tensor;
}

}  // namespace

void install_allocator() { c10::SetAllocator(c10::DeviceType::CUDA, &allocator); }

std::int64_t num_live_pieces() {
  const std::lock_guard lock(mutex);
  return static_cast<std::int64_t>(live.size());
}

std::int64_t num_made_pieces() {
  const std::lock_guard lock(mutex);
  return num_made;
}

std::int64_t num_made_bytes() {
  const std::lock_guard lock(mutex);
  return bytes_made;
}

void set_memory_limit(std::int64_t num_bytes) {
  const std::lock_guard lock(mutex);
  memory_limit = num_bytes;
}

}  // namespace cuda_host::torch

// Of torch's operators those that make tensors.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &cuda_host::torch::empty);
  library.impl("zero_", &cuda_host::torch::zero);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
}
