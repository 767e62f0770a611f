// Workspace over torch's own allocator.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>

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

}  // namespace zcomm::c10d_binding
