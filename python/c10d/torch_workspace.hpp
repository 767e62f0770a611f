// Workspace over torch's own allocator, and codecs with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>

#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::c10d_binding {

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
