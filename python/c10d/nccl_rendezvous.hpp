// Rendezvous of a group's ranks for an NCCL transport, and reports of its failure.
#pragma once

#include <memory>

#include "device_work.hpp"
#include "group_errors.hpp"
#include "options.hpp"
#include "python_hooks.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

class NcclRendezvous {
 public:
  // Takes PythonHooks::meet_for_nccl as `meet`; borrows `group` and `errors`.
  NcclRendezvous(const ::c10d::Backend& group, decltype(PythonHooks::meet_for_nccl) meet,
                 c10::intrusive_ptr<ZcommOptions> options, GroupErrors& errors)
      : group_(group), meet_(std::move(meet)), options_(std::move(options)), errors_(errors) {}

  // Connects this rank with its peers in `topology`. Sets later failures in `failure` and reports them to the peers in
  // the store. The transport must be destroyed before this object.
  std::unique_ptr<Transport> connect(const Topology& topology, const std::shared_ptr<Failure>& failure);

 private:
  const ::c10d::Backend& group_;
  decltype(PythonHooks::meet_for_nccl) meet_;
  c10::intrusive_ptr<ZcommOptions> options_;
  GroupErrors& errors_;
};

}  // namespace zcomm::c10d_binding
