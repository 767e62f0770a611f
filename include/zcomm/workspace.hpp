// Reusable scratch memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "zcomm/stream.hpp"

namespace zcomm {

// Allocator of scratch memory in stream order. Thread-safe.
//
// Derive from it to let zcomm use an allocator that you have.
class [[gnu::visibility("default")]] Workspace {
 public:
  virtual ~Workspace() = default;

  // Returns at least `num_bytes` bytes, aligned to at least 64. Their contents are undefined.
  // The memory is for work on `stream`. `num_bytes` may be 0.
  virtual std::byte* acquire(std::size_t num_bytes, StreamView stream) = 0;

  // Gives back memory that acquire() returned. Later work on `stream` may reuse it at once.
  virtual void release(std::byte* data, StreamView stream) noexcept = 0;
};

// Makes a pool of host memory, which ignores streams. The pool frees its memory when it is destroyed.
// A pool pays off because the first touch of new pages takes ten times as long as encoding values.
std::unique_ptr<Workspace> make_host_workspace();

// Owns one piece of scratch memory for the duration of a scope.
// The workspace must outlive it.
class Scratch {
 public:
  // Acquires `num_bytes` for work on `stream`; acquires nothing if `num_bytes` is 0. Throws what acquire() throws.
  Scratch(Workspace& workspace, std::size_t num_bytes, StreamView stream)
      : workspace_(&workspace),
        stream_(stream),
        data_(num_bytes == 0 ? nullptr : workspace.acquire(num_bytes, stream)) {}

  // Releases the memory on the same stream.
  ~Scratch() {
    if (data_ != nullptr) workspace_->release(data_, stream_);
  }
  Scratch(Scratch&& other) noexcept
      : workspace_(other.workspace_), stream_(other.stream_), data_(std::exchange(other.data_, nullptr)) {}
  Scratch& operator=(Scratch&&) = delete;

  // Returns the address of the memory, or null if there is none.
  std::byte* data() const { return data_; }

 private:
  Workspace* workspace_;
  StreamView stream_;
  std::byte* data_;
};

}  // namespace zcomm
