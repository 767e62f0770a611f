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

inline cudaStream_t as_cuda(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace zcomm
