// How the ranks of a group come to an NCCL transport, and tell one another when it fails.
#pragma once

#include <memory>

#include "device_work.hpp"
#include "group_errors.hpp"
#include "options.hpp"
#include "python_hooks.hpp"
#include "zcomm/transport.hpp"

namespace zcomm::c10d_binding {

class NcclRendezvous {
 public:
  // The keys "nccl/..." of `store` are used. `meet` is PythonHooks::meet_for_nccl; `group` and `errors` outlive this.
  NcclRendezvous(const ::c10d::Backend& group, StorePtr store, std::function<std::string()> meet,
                 c10::intrusive_ptr<ZcommOptions> options, GroupErrors& errors)
      : group_(group),
        store_(std::move(store)),
        meet_(std::move(meet)),
        options_(std::move(options)),
        errors_(errors) {}

  // Connects this rank with all others. What goes wrong later is set in `failure`, and the peers find it in the store.
  // The transport must end before this does.
  std::unique_ptr<Transport> connect(const std::shared_ptr<Failure>& failure);

 private:
  const ::c10d::Backend& group_;
  StorePtr store_;
  std::function<std::string()> meet_;
  c10::intrusive_ptr<ZcommOptions> options_;
  GroupErrors& errors_;
};

}  // namespace zcomm::c10d_binding
