// Planner: makes the operation of a request, and the job that runs it. Nothing else makes either.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "c10d/job/job.hpp"

namespace zcomm::c10d_binding {

// Makes the operation of a request in the formats of its policy. Throws ArgumentError.
OperationPtr make_operation(const Request& request, World world);

// The last operations of torch's own calls, which hold none: a call like one of the last is not planned again.
// Thread-safe.
class PlanCache {
 public:
  // Returns the operation of a request. Those with parts, a residual or differences are always made anew.
  OperationPtr find(const Request& request, const World& world);

 private:
  struct Key {
    Collective collective;
    HopFormats formats;
    at::DeviceType device;
    at::ScalarType dtype;
    std::int64_t num_elements;
    int root;
    bool in_one_hop;

    friend bool operator==(const Key&, const Key&) = default;
  };
  static constexpr std::size_t kCapacity = 32;

  std::mutex mutex_;
  std::vector<std::pair<Key, OperationPtr>> entries_;
  std::size_t num_replaced_ = 0;
};

// Makes a job for torch's tensors, with its operation. Applies the factor of the reduce operation. Copies inputs that
// results would overwrite.
JobPtr make_job(Request&& request, const World& world, PlanCache& cache);
// Makes a job of an operation that was planned for these tensors.
JobPtr make_job(Request&& request, OperationPtr operation);

}  // namespace zcomm::c10d_binding
