#include "zcomm/workspace.hpp"

#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "host/size_class.hpp"

namespace zcomm {
namespace {

constexpr std::align_val_t kAlignment{64};

class HostWorkspace final : public Workspace {
 public:
  ~HostWorkspace() override {
    for (const auto& [data, size] : sizes_) ::operator delete[](data, kAlignment);
  }
  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    const std::size_t size = size_class(num_bytes);
    const std::lock_guard lock(mutex_);
    for (auto it = idle_.lower_bound(size); it != idle_.end() && it->first <= largest_fit(size); ++it) {
      if (it->second.empty()) continue;
      std::byte* data = it->second.back();
      it->second.pop_back();
      return data;
    }
    idle_[size].reserve(++num_pieces_[size]);  // so that release() never allocates
    auto* const data = static_cast<std::byte*>(::operator new[](size, kAlignment));
    sizes_.emplace(data, size);
    return data;
  }

  void release(std::byte* data, StreamView) noexcept override {
    const std::lock_guard lock(mutex_);
    idle_.find(sizes_.find(data)->second)->second.push_back(data);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::byte*, std::size_t> sizes_;
  std::map<std::size_t, std::vector<std::byte*>> idle_;
  std::map<std::size_t, std::size_t> num_pieces_;  // by size, idle or not
};

}  // namespace

std::unique_ptr<Workspace> make_host_workspace() { return std::make_unique<HostWorkspace>(); }

}  // namespace zcomm
