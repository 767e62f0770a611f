#include "torch_workspace.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace zcomm::c10d_binding {
namespace {

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

}  // namespace

std::unique_ptr<Workspace> make_torch_workspace(c10::DeviceType type) { return std::make_unique<TorchWorkspace>(type); }

}  // namespace zcomm::c10d_binding
