// Lossless differences in the memory of NVIDIA GPUs.
#pragma once

#include <memory>

#include "zcomm/lossless.hpp"
#include "zcomm/workspace.hpp"

namespace zcomm::gpu {

// Returns a codec. `workspace` must outlive it: each call allocates 16 bytes per job and 8 per 64 tiles.
std::unique_ptr<LosslessCodec> make_cuda_lossless(Workspace& workspace);

}  // namespace zcomm::gpu
