// Rendezvous of a group's ranks for an NCCL transport, and reports of its failure.
#pragma once

#include <memory>

#include "group_errors.hpp"
#include "options.hpp"
#include "python_hooks.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

// Connects this rank of `group` with its peers in `topology`, which have met in PythonHooks::meet_for_nccl. Sets later
// failures in `errors` and reports them to the peers in the store. The transport must be destroyed before `group`.
std::unique_ptr<Transport> connect_nccl(const ::c10d::Backend& group, const PythonHooks& hooks,
                                        const ZcommOptions& options, const Topology& topology,
                                        const std::shared_ptr<GroupErrors>& errors);

}  // namespace zcomm::c10d_binding
