// Lossless differences in the memory of NVIDIA GPUs.
#pragma once

#include <memory>

#include "zcomm/difference.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::gpu {

// `workspace` must outlive it: calls ask it for 16 bytes for each job and 8 for each 64 tiles.
std::unique_ptr<DeviceDifferences> make_device_differences(Workspace& workspace);

}  // namespace zcomm::gpu
