// Reusable scratch memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "zcomm/stream.hpp"

namespace zcomm {

// Gives out scratch that is aligned to 64 bytes at least. Thread-safe.
class [[gnu::visibility("default")]] Workspace {
 public:
  virtual ~Workspace() = default;
  // At least num_bytes, contents undefined. May be reused by later work on `stream` once it is released.
  virtual std::byte* acquire(std::size_t num_bytes, StreamView stream) = 0;
  virtual void release(std::byte* data, StreamView stream) noexcept = 0;
};

// Host memory that is kept and handed out again: touching fresh pages costs ten times a codec pass.
std::unique_ptr<Workspace> make_host_workspace();

// Owns one piece of scratch.
class Scratch {
 public:
  Scratch(Workspace& workspace, std::size_t num_bytes, StreamView stream)
      : workspace_(&workspace), stream_(stream), data_(workspace.acquire(num_bytes, stream)) {}
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
