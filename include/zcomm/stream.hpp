// Streams, which order work on a device.
#pragma once

namespace zcomm {

// Borrows a device's stream: a cudaStream_t on a GPU. A CPU has none: calls return when their work is done.
struct StreamView {
  void* handle = nullptr;
};

}  // namespace zcomm
