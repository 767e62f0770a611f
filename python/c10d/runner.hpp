// Runner of compressed collectives on the tensors of one device type.
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
  virtual WorkPtr launch(JobPtr job) = 0;

  // Blocks until all jobs so far are done; returns false after `limit`.
  virtual bool drain(std::chrono::milliseconds limit) = 0;
  // Makes jobs in progress and later ones fail, on the peers as well. Thread-safe.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Stops launching jobs. Idempotent.
  virtual void stop() = 0;
};

}  // namespace zcomm::c10d_binding
