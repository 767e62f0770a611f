// One compressed collective, ready to run.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct Job {
  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  virtual ~Job() = default;

  // Carries it out. On a CPU it is done on return, on a GPU all of it is queued on `stream`. Called once; throws Error.
  virtual void run(Communicator& communicator, StreamView stream) = 0;

  ::c10d::OpType type{};
  const char* title = "";           // as profilers show it
  std::vector<at::Tensor> inputs;   // held until it is done, as are the outputs
  std::vector<at::Tensor> outputs;  // at least one
  std::uint64_t sequence_number = 0;
  std::uint64_t record = 0;  // of the flight recorder
  bool async = false;        // the call returns before it is complete
};

}  // namespace zcomm::c10d_binding
