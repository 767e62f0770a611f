// Pool of device memory.
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/owned.hpp"
#include "host/detached.hpp"
#include "host/size_class.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

using CaptureId = std::uint64_t;  // of capture_of()

class Piece {
 public:
  Piece(std::size_t num_bytes, int on_device) : size(num_bytes), device(on_device), bytes_(num_bytes) {}

  std::byte* data() const { return bytes_.data(); }

  // Returns false where no event can tell the end of its work: that is eager, and the release is captured.
  bool mark_released(cudaStream_t on_stream) {
    stream = on_stream;
    capture = capture_of({on_stream});
    if (capture != 0) return num_graphs > 0;
    released_.record({on_stream});
    return true;
  }
  // Tells whether neither queued work nor a graph can use the piece any more. A graph may have it from eager work that
  // is still queued, and be destroyed before.
  bool is_passed() const { return num_graphs == 0 && released_.is_over(); }

  const std::size_t size;
  const int device;
  cudaStream_t stream = nullptr;  // of the last release
  // Capture it was released in. Replays use the piece at unknown times, so no other stream or graph may have it.
  CaptureId capture = 0;
  std::atomic<int> num_graphs{0};  // live graphs that use it, captures in progress included

 private:
  Event released_;
  DeviceBytes bytes_;
};

// Keeps `piece` alive as long as the graph that `stream` records, and its instances.
void keep_for_graph(cudaStream_t stream, std::shared_ptr<Piece> piece) {
  constexpr const char* kWhat = "tie scratch to a graph";
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph), kWhat);
  auto* kept = new std::shared_ptr<Piece>(std::move(piece));
  // Runs inside a callback of CUDA, which forbids calls of CUDA.
  const auto let_go = [](void* data) {
    const std::unique_ptr<std::shared_ptr<Piece>> last(static_cast<std::shared_ptr<Piece>*>(data));
    --(*last)->num_graphs;
    if (last->use_count() > 1) return;
    run_detached([freed = std::move(*last)]() mutable {
      static_cast<void>(cudaSetDevice(freed->device));  // any other one would get a context
      freed.reset();
    });
  };
  cudaUserObject_t object = nullptr;
  ++(*kept)->num_graphs;
  if (const cudaError_t result = cudaUserObjectCreate(&object, kept, let_go, 1, cudaUserObjectNoDestructorSync);
      result != cudaSuccess) {
    --(*kept)->num_graphs;
    delete kept;
    check_cuda(result, kWhat);
  }
  check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove), kWhat);
}

class CudaWorkspace final : public Workspace {
 public:
  std::byte* acquire(std::size_t num_bytes, StreamView view) override {
    const std::size_t size = size_class(num_bytes);
    const cudaStream_t stream = as_cuda(view);
    int device = 0;
    check_cuda(cudaGetDevice(&device), "tell the current device");
    const CaptureId capture = capture_of(view);
    const std::lock_guard lock(mutex_);
    // One handle is a stream of its own in each thread, so its work is in no order that is known here.
    const bool is_known = stream != cudaStreamPerThread;
    const auto is_ordered = [&](const Piece& piece) {
      return piece.stream == stream && piece.capture == capture && (is_known || capture != 0);
    };
    // Pieces released by eager work on the stream are free for a graph, too: its first launch follows that work.
    const auto is_eager = [&](const Piece& piece) { return is_known && piece.stream == stream && piece.capture == 0; };
    const auto is_passed = [&](const Piece& piece) { return piece.is_passed(); };
    Piece* piece = take(size, device, is_ordered);
    if (piece == nullptr && capture != 0) piece = take(size, device, is_eager);
    if (piece == nullptr) piece = take(size, device, is_passed);
    if (piece != nullptr) {
      if (capture != 0) keep_for_graph(stream, owned_.find(piece->data())->second);
      return piece->data();
    }
    if (capture != 0) {
      throw Error("a CUDA graph is captured, and " + std::to_string(size) +
                  " bytes of scratch would have to be allocated: run the same calls once on this stream before each "
                  "capture");
    }
    auto fresh = std::make_shared<Piece>(size, device);
    auto& idle = idle_[size];
    idle.reserve(++num_pieces_[size]);  // so that release() never allocates
    std::byte* data = fresh->data();
    owned_.emplace(data, std::move(fresh));
    return data;
  }

  void release(std::byte* data, StreamView view) noexcept override {
    const std::lock_guard lock(mutex_);
    Piece& piece = *owned_.find(data)->second;
    try {
      const CudaDeviceGuard guard(piece.device);
      if (!piece.mark_released(as_cuda(view))) return;
    } catch (const Error&) {
      return;  // the end of its work is unknown: the workspace frees it in its destructor
    }
    idle_.find(piece.size)->second.push_back(&piece);
  }

 private:
  // Takes the idle piece of about `size` that was released first and is `free_now`, or null.
  template <class FreeNow>
  Piece* take(std::size_t size, int device, FreeNow&& free_now) {
    for (auto it = idle_.lower_bound(size); it != idle_.end() && it->first <= largest_fit(size); ++it) {
      std::vector<Piece*>& idle = it->second;
      for (std::size_t i = 0; i < idle.size(); ++i) {
        Piece* piece = idle[i];
        if (piece->device != device || !free_now(*piece)) continue;
        idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(i));
        return piece;
      }
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::unordered_map<std::byte*, std::shared_ptr<Piece>> owned_;
  std::map<std::size_t, std::vector<Piece*>> idle_;
  std::map<std::size_t, std::size_t> num_pieces_;  // by size, idle or not
};

}  // namespace

std::unique_ptr<Workspace> make_cuda_workspace() { return std::make_unique<CudaWorkspace>(); }

}  // namespace zcomm
