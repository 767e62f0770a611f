// Scratch from torch's own allocator.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "zcomm/workspace.hpp"

namespace zcomm::c10d_binding {

// For `type`'s memory. A piece belongs to the stream that is torch's current one when it is acquired, which must be the
// one that acquire() is given; under graph capture it comes from the graph's pool.
std::unique_ptr<Workspace> make_torch_workspace(c10::DeviceType type);

}  // namespace zcomm::c10d_binding
