// Conversion of CUDA's return codes to exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "zcomm/error.hpp"
#include "zcomm/stream.hpp"

namespace zcomm {

// Returns advice that CUDA's own message lacks; empty if there is none.
std::string remedy(cudaError_t result);

// Throws Error unless `result` is success. `what` names the attempted action.
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // so that the caller's next check does not report it again
  throw Error(std::string("CUDA could not ") + what + ": " + cudaGetErrorString(result) + " (" +
              cudaGetErrorName(result) + ")" + remedy(result));
}

// Sets, for its lifetime, which graph captures forbid this thread's host queries and waits, allocations and kernel
// loads. A forbidden call breaks the capture.
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

// Lets this thread make such calls during any capture, by this thread or another.
struct RelaxedCapture : CaptureMode {
  RelaxedCapture() : CaptureMode(cudaStreamCaptureModeRelaxed) {}
};

inline cudaStream_t as_cuda(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace zcomm
