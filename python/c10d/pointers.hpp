// torch's objects as it hands them around.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace zcomm::c10d_binding {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

}  // namespace zcomm::c10d_binding
