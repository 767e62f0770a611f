// Where work is ordered.
#pragma once

namespace zcomm {

// Borrows a device's queue: a cudaStream_t on a GPU. On a CPU there is none: calls return when their work is done.
struct StreamView {
  void* handle = nullptr;
};

}  // namespace zcomm
