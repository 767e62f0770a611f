// Job: one call of a compressed collective, a request with its operation.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "c10d/base/group_errors.hpp"
#include "request.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct Job : Request {
  explicit Job(Request&& request) : Request(std::move(request)) {}
  Job(const Job&) = delete;

  // Runs the job on the result of `connect`: on a CPU until it is done, on a GPU until all work is queued on `stream`.
  // Called once; throws what `errors` makes of a failure.
  void run(const std::function<Communicator&()>& connect, StreamView stream, GroupErrors& errors);

  // Returns the name for profilers, a literal.
  const char* title() const;

  Arguments arguments() const {
    return {
        {read.data(), read.size()}, {written.data(), written.size()}, factor, feedback ? &*feedback : nullptr, wires};
  }

  OperationPtr operation;
  c10::SmallVector<ConstTensorView, 8> read;  // of the inputs
  c10::SmallVector<TensorView, 8> written;    // of the outputs; a job has at least one
  std::span<std::byte> wires;
  float factor = 1.0f;
  std::uint64_t seed = 0;  // of stochastic rounding
  std::uint64_t sequence_number = 0;
  std::uint64_t record = 0;  // of the flight recorder
  std::span<Observer* const> observers;
};

using JobPtr = std::unique_ptr<Job>;

}  // namespace zcomm::c10d_binding
