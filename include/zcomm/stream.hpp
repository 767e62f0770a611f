// Streams, which order work on a device.
#pragma once

namespace zcomm {

// Borrows a stream of a device. `handle` is a cudaStream_t on a GPU; null is the legacy default stream.
// A CPU has no streams: the handle is ignored there, and calls return when their work is done.
struct StreamView {
  void* handle = nullptr;
};

}  // namespace zcomm
