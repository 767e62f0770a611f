// Reusable scratch memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "zcomm/stream.hpp"

namespace zcomm {

// Allocator of scratch memory, aligned to at least 64 bytes. Thread-safe.
class [[gnu::visibility("default")]] Workspace {
 public:
  virtual ~Workspace() = default;
  // Returns at least num_bytes, contents undefined. After release, later work on `stream` may reuse the memory.
  virtual std::byte* acquire(std::size_t num_bytes, StreamView stream) = 0;
  virtual void release(std::byte* data, StreamView stream) noexcept = 0;
};

// Makes a pool of host memory: touching fresh pages costs ten times a codec pass.
std::unique_ptr<Workspace> make_host_workspace();

// Owns one piece of scratch; null if it is empty.
class Scratch {
 public:
  Scratch(Workspace& workspace, std::size_t num_bytes, StreamView stream)
      : workspace_(&workspace),
        stream_(stream),
        data_(num_bytes == 0 ? nullptr : workspace.acquire(num_bytes, stream)) {}
  ~Scratch() {
    if (data_ != nullptr) workspace_->release(data_, stream_);
  }
  Scratch(Scratch&& other) noexcept
      : workspace_(other.workspace_), stream_(other.stream_), data_(std::exchange(other.data_, nullptr)) {}
  Scratch& operator=(Scratch&&) = delete;

  std::byte* data() const { return data_; }

 private:
  Workspace* workspace_;
  StreamView stream_;
  std::byte* data_;
};

}  // namespace zcomm
