// Observers of the compressed calls of a group.
#pragma once

#include <memory>

#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct Job;

class Observer {
 public:
  virtual ~Observer() = default;
  // Called on the caller's thread, before the job is queued or run. The result is held until launch() returns.
  virtual std::shared_ptr<void> queued(Job&) { return nullptr; }
  // Called on the job's thread, in which the job's stream is torch's current one.
  virtual void started(const Job&, Communicator&, StreamView) {}
  virtual void ended(const Job&, const CallStats&) {}  // on a GPU: its work is queued
  virtual void failed(const Job&) {}                   // with an exception, which the caller receives
};

}  // namespace zcomm::c10d_binding
