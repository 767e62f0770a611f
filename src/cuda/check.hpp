// CUDA's return codes as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "zcomm/error.hpp"
#include "zcomm/stream.hpp"

namespace zcomm {

// What helps where CUDA's own words do not say it; empty otherwise.
std::string remedy(cudaError_t result);

// `what` says in words what was tried.
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the caller's next check would report it again
  throw Error(std::string("CUDA could not ") + what + ": " + cudaGetErrorString(result) + " (" +
              cudaGetErrorName(result) + ")" + remedy(result));
}

// Which captures of graphs forbid what this thread does: queries and waits of the host, allocations, the load of a
// kernel. What is forbidden breaks the capture.
class CaptureMode {
 public:
  explicit CaptureMode(cudaStreamCaptureMode mode) : mode_(mode) {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  ~CaptureMode() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  CaptureMode(const CaptureMode&) = delete;
  CaptureMode& operator=(const CaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_;
};

// None do, neither this thread's nor another's.
struct RelaxedCapture : CaptureMode {
  RelaxedCapture() : CaptureMode(cudaStreamCaptureModeRelaxed) {}
};

inline cudaStream_t as_cuda(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace zcomm
