// Codecs of host and GPU tensors, for values that no communicator of the group handles.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>

#include "torch_workspace.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::c10d_binding {

class DeviceCodecs {
 public:
  const Codec& of(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return *host_;
    std::call_once(cuda_once_, [&] {
      cuda_workspace_ = std::make_unique<TorchWorkspace>(tensor.device().type());
      cuda_ = make_cuda_codec(*cuda_workspace_);
    });
    return *cuda_;
  }

 private:
  const std::unique_ptr<Codec> host_ = make_cpu_codec();
  std::unique_ptr<Workspace> cuda_workspace_;
  std::unique_ptr<Codec> cuda_;
  std::once_flag cuda_once_;
};

}  // namespace zcomm::c10d_binding
