// Carries out compressed collectives on the tensors of one device type.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "job.hpp"
#include "pointers.hpp"

namespace zcomm::c10d_binding {

inline constexpr std::chrono::hours kNoLimit{24 * 365};

class Runner {
 public:
  virtual ~Runner() = default;
  virtual WorkPtr launch(std::unique_ptr<Job> job) = 0;

  // Blocks until all jobs so far are done, or `limit` has passed: then false.
  virtual bool drain(std::chrono::milliseconds limit) = 0;
  // Makes jobs under way and later ones fail, on the peers as well. Any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
  // No job is launched any more. Idempotent.
  virtual void stop() = 0;
};

}  // namespace zcomm::c10d_binding
