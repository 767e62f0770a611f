// Support of NVIDIA GPUs. Failures of CUDA throw Error with the runtime's message.
//
// In a build without CUDA, the queries say that there is none: an empty text, no device, no capture.
// RelaxedCaptureGuard does nothing there, and everything else throws Error that says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zcomm/codec.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// Returns the version of the CUDA toolkit that this build was made with, such as "13.0". Empty without CUDA.
std::string cuda_toolkit();

// Returns the architectures of this build's kernels, such as "80-real 90-real 100-real 120". Empty without CUDA.
std::string cuda_targets();

// Returns the number of GPUs that this process can use; 0 without a driver. Never throws.
int cuda_device_count();

// Makes a device the current one of this thread until the guard is destroyed.
class CudaDeviceGuard {
 public:
  // Throws Error if there is no such device.
  explicit CudaDeviceGuard(int device);
  // Makes the previous device the current one again. Must run on the same thread.
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_;
};

// Lets this thread make calls that a graph capture forbids, until the guard is destroyed.
//
// Such calls are queries and waits of the host, allocations, and first launches of kernels. Without the guard they
// break a capture, by this thread or another.
class RelaxedCaptureGuard {
 public:
  RelaxedCaptureGuard();
  ~RelaxedCaptureGuard();
  RelaxedCaptureGuard(const RelaxedCaptureGuard&) = delete;
  RelaxedCaptureGuard& operator=(const RelaxedCaptureGuard&) = delete;

 private:
  int previous_;
};

// Returns a unique number of the CUDA graph that `stream` is capturing; 0 if it captures none.
// Does not block the host.
std::uint64_t capture_of(StreamView stream);

// Returns true if `stream` is capturing a CUDA graph.
inline bool is_capturing(StreamView stream) { return capture_of(stream) != 0; }

// Makes `stream` wait for the work that is queued on `earlier` now. Does not block the host.
void wait_for(StreamView stream, StreamView earlier);

// Queues a copy within the memory of a GPU on `stream`.
void copy(std::byte* target, const std::byte* source, std::size_t num_bytes, StreamView stream);

// Blocks the host until all work on `stream` has completed.
void synchronize(StreamView stream);

// Makes the codec for GPU memory. Results have the bits of make_cpu_codec().
//
// A call works on the device that is current then, and `stream` must belong to it. It only queues work, without
// allocation or synchronization, so a graph can capture it.
//
// `workspace` must outlive the codec. Sums use it if they have more wires than fit a launch. Lossless differences use
// 16 bytes per job and 8 per 128 Ki values.
std::unique_ptr<Codec> make_cuda_codec(Workspace& workspace);

// Makes a pool of device memory, for callers without an allocator. The stream that released a piece reuses it.
//
// acquire() takes memory of the current device, with cudaMalloc if no piece fits. During a graph capture it does not
// allocate: it throws Error, so run the same calls once on that stream before each capture.
// The memory is freed when the workspace and the last graph that captured its use are destroyed.
std::unique_ptr<Workspace> make_cuda_workspace();

}  // namespace zcomm
