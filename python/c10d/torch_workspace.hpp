// Workspace over torch's own allocator.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "zcomm/workspace.hpp"

namespace zcomm::c10d_binding {

// Makes a workspace for memory of `type`. A piece belongs to torch's current stream at acquire(), which must be the one
// passed to it; during graph capture it comes from the graph's pool.
std::unique_ptr<Workspace> make_torch_workspace(c10::DeviceType type);

}  // namespace zcomm::c10d_binding
