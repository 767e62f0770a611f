// The codec for GPUs, which the bindings of codecs share.
#pragma once

#include <optional>
#include <utility>

#include "views.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {

// For the device that is current. It lives as long as the process: CUDA may be gone before static objects are.
inline const Codec& cuda_codec() {
  static auto& workspace = *make_cuda_workspace().release();
  static auto& codec = *make_cuda_codec(workspace).release();
  return codec;
}

// Calls body(codec, stream) while `device`, a GPU's index or kCurrentDevice, is the current one.
template <class Body>
void on_gpu(int device, std::uintptr_t stream, Body&& body) {
  std::optional<CudaDeviceGuard> guard;
  if (device != kCurrentDevice) guard.emplace(device);
  std::forward<Body>(body)(cuda_codec(), stream_of(stream));
}

}  // namespace zcomm
