// Observer: is notified of a group's jobs. Statistics, the flight recorder, telemetry, profilers and
// the hooks of users are observers.
#pragma once

#include <cstdint>
#include <memory>

#include "c10d/base/pointers.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct Job;

class Observer {
 public:
  virtual ~Observer() = default;

  // Called on the caller's thread, before a runner has the job. The result lives until the runner has taken it.
  virtual std::shared_ptr<void> begin(Job&) { return nullptr; }
  // Called on the caller's thread, with the result of begin(), when the runner has the job.
  virtual void launched(const std::shared_ptr<void>&, const WorkPtr&) {}
  // The runner has refused the job with this Job::record, or has failed in it before it returned.
  virtual void refused(std::uint64_t) {}

  // --- On the job's thread, with its stream current

  virtual void starts(const Job&, Communicator&, StreamView) {}
  // On a GPU the work is queued.
  virtual void ran(const Job&, const CallStats&) {}
  virtual void failed(const Job&) {}
};

}  // namespace zcomm::c10d_binding
