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
  struct Device {
    std::shared_ptr<Workspace> workspace;
    std::unique_ptr<Codec> codec;
  };

  const Device& host() const { return host_; }
  const Device& of(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return host_;
    std::call_once(cuda_once_, [&] {
      cuda_.workspace = make_torch_workspace(tensor.device().type());
      cuda_.codec = make_cuda_codec(*cuda_.workspace);
    });
    return cuda_;
  }

 private:
  const Device host_{make_host_workspace(), make_cpu_codec()};
  Device cuda_;
  std::once_flag cuda_once_;
};

}  // namespace zcomm::c10d_binding
