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

struct Free {
  void operator()(std::byte* data) const noexcept { ::operator delete[](data, kAlignment); }
};
using Owned = std::unique_ptr<std::byte[], Free>;

class HostWorkspace final : public Workspace {
 public:
  std::byte* acquire(std::size_t num_bytes, StreamView) override {
    const std::size_t size = size_class(num_bytes);
    const std::lock_guard lock(mutex_);
    for (auto it = idle_.lower_bound(size); it != idle_.end() && it->first <= largest_fit(size); ++it) {
      if (it->second.empty()) continue;
      std::byte* data = it->second.back();
      it->second.pop_back();
      return data;
    }
    auto& idle = idle_[size];
    Owned fresh(new (kAlignment) std::byte[size]);
    std::byte* data = fresh.get();
    owned_.emplace(data, Piece{size, std::move(fresh)});
    idle.reserve(++num_pieces_[size]);  // so that release() never allocates
    return data;
  }

  void release(std::byte* data, StreamView) noexcept override {
    const std::lock_guard lock(mutex_);
    idle_.find(owned_.find(data)->second.size)->second.push_back(data);
  }

 private:
  struct Piece {
    std::size_t size;
    Owned memory;
  };
  std::mutex mutex_;
  std::unordered_map<std::byte*, Piece> owned_;
  std::map<std::size_t, std::vector<std::byte*>> idle_;
  std::map<std::size_t, std::size_t> num_pieces_;  // by size, idle or not
};

}  // namespace

std::unique_ptr<Workspace> make_host_workspace() { return std::make_unique<HostWorkspace>(); }

}  // namespace zcomm
