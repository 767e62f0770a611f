// Planner: makes the operation of a request, and the job that runs it. Nothing else makes either.
#pragma once

#include "c10d/job/job.hpp"

namespace zcomm::c10d_binding {

// Makes the operation of a request in the formats of its policy. Throws ArgumentError.
OperationPtr make_operation(const Request& request, World world);

// Makes a job for torch's tensors, and its operation. Applies the factor of the reduce operation. Copies inputs that
// results would overwrite.
JobPtr make_job(Request&& request, World world);
// Makes a job of an operation that was planned for these tensors.
JobPtr make_job(Request&& request, OperationPtr operation);

}  // namespace zcomm::c10d_binding
