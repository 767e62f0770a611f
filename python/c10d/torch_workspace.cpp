#include "torch_workspace.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace zcomm::c10d_binding {
namespace {

class TorchWorkspace final : public Workspace {
 public:
  explicit TorchWorkspace(c10::DeviceType type) : allocator_(c10::GetAllocator(type)) {}

  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    c10::DataPtr piece = allocator_->allocate(std::max<std::size_t>(num_bytes, 1));
    std::byte* data = static_cast<std::byte*>(piece.get());
    const std::lock_guard lock(mutex_);
    pieces_.emplace(data, std::move(piece));
    return data;
  }

  void release(std::byte* data, StreamView) noexcept override {
    c10::DataPtr piece;  // freed after the lock is released
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find(data);
    piece = std::move(found->second);
    pieces_.erase(found);
  }

 private:
  c10::Allocator* allocator_;
  std::mutex mutex_;
  std::unordered_map<std::byte*, c10::DataPtr> pieces_;
};

}  // namespace

std::unique_ptr<Workspace> make_torch_workspace(c10::DeviceType type) { return std::make_unique<TorchWorkspace>(type); }

}  // namespace zcomm::c10d_binding
