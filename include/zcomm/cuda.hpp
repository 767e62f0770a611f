// Support of NVIDIA GPUs. In a build without CUDA, all functions but the first three and capture_of()
// throw Error that says so. Failures of CUDA throw Error with the runtime's message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "zcomm/codec.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

// Return what this build was made with: "13.0" and the architectures of its kernels, "80-real 90-real 100-real 120".
// Empty without CUDA.
std::string cuda_toolkit();
std::string cuda_targets();

// Returns 0 without a driver.
int cuda_device_count();

// Makes `device` this thread's current one for as long as the guard lives.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device);
  ~CudaDeviceGuard();
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_;
};

// Lets this thread make calls that a capture, by this thread or another, forbids: queries and waits of the host,
// allocations, first launches of kernels. A forbidden call breaks the capture. Ends with the guard.
class RelaxedCaptureGuard {
 public:
  RelaxedCaptureGuard();
  ~RelaxedCaptureGuard();
  RelaxedCaptureGuard(const RelaxedCaptureGuard&) = delete;
  RelaxedCaptureGuard& operator=(const RelaxedCaptureGuard&) = delete;

 private:
  int previous_;
};

// Identifies the CUDA graph that `stream` is capturing by a unique number; 0 if it captures none.
std::uint64_t capture_of(StreamView stream);
inline bool is_capturing(StreamView stream) { return capture_of(stream) != 0; }

// Makes `stream` wait for the work that is on `earlier` now; does not block the host.
void wait_for(StreamView stream, StreamView earlier);

// Blocks the host until all work on `stream` is done.
void synchronize(StreamView stream);

// Makes the codec for memory of the device that is current at each call; `stream` must belong to it. Calls only queue
// work, without allocation or synchronization, and can be captured in a graph. `workspace` must outlive the codec. It
// is used by sums with more wires than fit a launch, and by lossless differences: 16 bytes per job and 8 per 128 Ki
// values. Results have the bits of make_cpu_codec().
std::unique_ptr<Codec> make_cuda_codec(Workspace& workspace);

// Makes a pool of device memory for callers without an allocator: pieces are reused by the stream that released them.
// Allocates with cudaMalloc at first use, but not during graph capture. Frees memory when the workspace and the last
// graph that captured its use are destroyed.
std::unique_ptr<Workspace> make_cuda_workspace();

}  // namespace zcomm
