// GPU codec, shared by the bindings of codecs.
#pragma once

#include <optional>
#include <utility>

#include "views.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {

// Returns the codec for the current device. It lives as long as the process: CUDA may shut down before static objects.
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
