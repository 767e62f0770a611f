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

// Lets this thread query events while it, or another one, captures a graph; an ordinary query would break that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

inline cudaStream_t as_cuda(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace zcomm
