// NVIDIA GPUs. A build without CUDA has all of this, too; there everything but cuda_build() and cuda_device_count()
// throws Error that says so. CUDA's own failures are Error with the runtime's message.
#pragma once

#include <memory>
#include <string>

#include "zcomm/codec.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm {

struct CudaBuild {
  std::string toolkit;  // "13.0"; empty in a build without CUDA
  std::string targets;  // what the kernels are compiled for, "80-real 90-real 100-real 120"
};
CudaBuild cuda_build();

// 0 without a driver.
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

// True while `stream` records a CUDA graph instead of running.
bool is_capturing(StreamView stream);

// Makes `stream` wait for the work that is on `earlier` now; does not block the host.
void wait_for(StreamView stream, StreamView earlier);

// Blocks the host until all work on `stream` is done.
void synchronize(StreamView stream);

// The codec for memory of the device that is current at each call; `stream` must be of that device. Calls only queue:
// no allocation, no synchronization; they can be captured in a graph. `workspace` must outlive the codec; it is asked
// for memory only where a sum has more wires than fit a launch, and by differences: 16 bytes for each job and 8 for
// each 128 Ki values. Bits are those of make_cpu_codec().
std::unique_ptr<Codec> make_cuda_codec(Workspace& workspace);

// Device memory for callers without an allocator of their own: pieces are kept and handed out again, to the stream that
// released them. Allocates with cudaMalloc at first use; not while a graph is captured. Freed with the workspace, or
// with the last graph that captured their use.
std::unique_ptr<Workspace> make_cuda_workspace();

}  // namespace zcomm
