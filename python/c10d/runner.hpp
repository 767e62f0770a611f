// Carries out compressed collectives on the tensors of one device type.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

// One compressed collective.
struct Job {
  ::c10d::OpType type;
  const char* title;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::uint64_t sequence_number;
  bool async;  // the caller goes on before it is done
  std::function<void(Communicator&, StreamView)> run;
};

inline constexpr std::chrono::hours kNoLimit{24 * 365};

class Runner {
 public:
  virtual ~Runner() = default;
  virtual c10::intrusive_ptr<::c10d::Work> launch(Job job) = 0;

  // Blocks until all jobs so far are done, or `limit` has passed: then false.
  virtual bool drain(std::chrono::milliseconds limit) = 0;
  // Makes jobs under way and later ones fail, on the peers as well. Any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
  // No job is launched any more. Idempotent.
  virtual void stop() = 0;
};

// How a runner tells its group what went wrong: remembers it, and makes it the exception that the caller gets.
using OnError = std::function<std::exception_ptr(const std::exception& error)>;

}  // namespace zcomm::c10d_binding
