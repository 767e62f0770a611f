// Several works, seen as one by the caller.
#pragma once

#include <vector>

#include "pointers.hpp"

namespace zcomm::c10d_binding {

// Joins works into one. Takes the caller's tensors in its order; without any, the results are those of the works, in
// their order.
WorkPtr combine(int rank, std::vector<WorkPtr> works, std::vector<at::Tensor> results = {});

}  // namespace zcomm::c10d_binding
