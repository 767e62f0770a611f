// Job: one call of a compressed collective, an operation with the tensors of the call.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "group_errors.hpp"
#include "stats.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

class Telemetry;

inline constexpr std::chrono::hours kNoLimit{24 * 365};  // of a wait for jobs

// Kept values in a tensor, and the end of their last decode on a GPU, which later calls wait for.
struct TensorKept : Kept {
  void hold(at::Tensor tensor) {
    memory = {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
    data = std::move(tensor);
  }

  at::Tensor data;  // uint8 [kept_bytes of the operation], on the device of the calls
  std::optional<c10::Event> decoded;
};

// Settings of one call, from its own options and the group's.
struct CallSettings {
  Policy policy;
  std::chrono::milliseconds timeout;
  bool async;              // the call returns before it is complete
  bool rehearsal = false;  // see AutoPolicy: counted apart, never sampled, draws no seed of a step
};

struct Job {
  // Takes a `title` for profilers.
  Job(Collective job_collective, ::c10d::OpType job_type, const char* job_title, const CallSettings& settings)
      : collective(job_collective),
        type(job_type),
        title(job_title),
        timeout(settings.timeout),
        async(settings.async),
        rehearsal(settings.rehearsal) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Runs the job on the result of `connect`: on a CPU until it is done, on a GPU until all work is queued on `stream`.
  // Called once; throws what `errors` makes of a failure.
  void run(const std::function<Communicator&()>& connect, StreamView stream, GroupErrors& errors);

  Arguments arguments() const {
    return {
        {read.data(), read.size()}, {written.data(), written.size()}, factor, feedback ? &*feedback : nullptr, wires};
  }

  const Collective collective;
  const ::c10d::OpType type;
  const char* const title;
  const std::chrono::milliseconds timeout;
  const bool async;
  const bool rehearsal;
  OperationPtr operation;
  c10::SmallVector<ConstTensorView, 8> read;  // of the tensors below, like the next ones
  c10::SmallVector<TensorView, 8> written;
  std::span<std::byte> wires;
  float factor = 1.0f;
  std::optional<Feedback> feedback;
  std::vector<at::Tensor> inputs;   // held until the job is done, like the outputs
  std::vector<at::Tensor> outputs;  // at least one: the input, where a gather has none
  SitePtr site;
  std::vector<std::pair<SitePtr, std::int64_t>> shares;  // other sites, and their shares of the bytes between nodes
  std::uint64_t seed = 0;                                // of stochastic rounding
  std::uint64_t sequence_number = 0;
  std::uint64_t record = 0;      // of the flight recorder
  SharedStats* stats = nullptr;  // of the group, as the next one
  Telemetry* telemetry = nullptr;
};

using JobPtr = std::unique_ptr<Job>;

}  // namespace zcomm::c10d_binding
