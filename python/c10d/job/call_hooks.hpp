// Call hooks: Python functions that see the calls of all groups of the process. See zcomm.register_hook().
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/base/pointers.hpp"
#include "observer.hpp"

namespace zcomm::c10d_binding {

// Call as hooks see it.
struct HookedCall {
  std::string group;
  std::string collective;          // as the flight recorder names it
  std::string verdict;             // "compressed", or why the call is exact
  std::vector<at::Tensor> inputs;  // the caller's
  std::vector<at::Tensor> outputs;
  std::string description;         // shape and formats of a compressed call
  std::string site;                // empty if the caller has named none
  std::optional<LinkBytes> bytes;  // that this rank will send, if they do not depend on the values
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
};
using HookedCallPtr = std::shared_ptr<HookedCall>;

// Hooks of one group's calls. Thread-safe; without hooks a call costs one load.
class CallHooks final : public Observer {
 public:
  // Borrows `group`.
  explicit CallHooks(const ::c10d::Backend& group) : group_(group) {}

  // Sets the function of the process: called with "pre" and the call, with "post", the call and its work, and with
  // "abort", a call that has only its group, and the error. None: there are no hooks. Requires the GIL.
  static void set(pybind11::object function);
  // Calls the hooks with the first error of a group. Their own errors are printed, as nobody else can have them.
  static void abort(const std::string& group, const std::string& error) noexcept;

  // Calls the hooks before a call of torch's own groups. Returns null without hooks. Throws what a hook raises.
  HookedCallPtr begin(std::string_view collective, std::string_view verdict, at::TensorList inputs,
                      at::TensorList outputs) const;
  // Calls the hooks after the call was launched; `call` and `work` may be null.
  static void end(const HookedCallPtr& call, const WorkPtr& work);

  std::shared_ptr<void> begin(Job& job) override;
  void launched(const std::shared_ptr<void>& begun, const WorkPtr& work) override {
    end(std::static_pointer_cast<HookedCall>(begun), work);
  }

 private:
  const ::c10d::Backend& group_;
};

}  // namespace zcomm::c10d_binding
