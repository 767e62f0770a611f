// Job: one call of a compressed collective, an operation with the tensors of the call. Also what is counted of calls,
// and told to profilers.
#pragma once

#include <c10/core/Event.h>
#include <c10/util/SmallVector.h>
#include <c10/util/Synchronized.h>

#include <array>
#include <atomic>
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

#include "c10d/base/group_errors.hpp"
#include "c10d/policy/policy.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::c10d_binding {

struct RecordedCall;
class Telemetry;

// Counters of a group's calls.
struct Stats {
  // Number of calls and their bytes, of the gathered, scattered or reduced tensor.
  struct Calls {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
    void add(std::int64_t num_bytes) {
      ++calls;
      bytes += static_cast<std::uint64_t>(num_bytes);
    }
  };

  Calls& calls(Collective collective, Verdict verdict) {
    return by_verdict[static_cast<std::size_t>(collective)][static_cast<std::size_t>(verdict)];
  }
  // Returns the sums of compressed calls.
  CallStats& cost(Collective collective) { return cost_of[static_cast<std::size_t>(collective)]; }

  std::array<std::array<Calls, kNumVerdicts>, kCollectives.size()> by_verdict;
  std::array<CallStats, kCollectives.size()> cost_of;
  Calls rehearsals;  // of policy="auto", on scratch; counted nowhere else
  CallStats rehearsals_cost;
  Calls others;  // calls that the policy does not decide about
  // Whether ranks of the node share memory: "" before the first call that asks, "shared", or why they do not.
  std::string node_memory;
};
using SharedStats = c10::Synchronized<Stats>;

// Place in a program that calls collectives, with counters of its own.
struct Site {
  // Returns the telemetry's name of the `index`-th of `count` segments that are not exact.
  std::string name_of_part(std::size_t index, std::size_t count) const {
    return parts.size() == count ? name + "." + parts[index] : name;
  }

  const std::string name;
  const std::vector<std::string> parts;
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> intra_node_bytes{0};  // sent by this rank, like the next one
  std::atomic<std::uint64_t> inter_node_bytes{0};
};

using SitePtr = std::shared_ptr<Site>;  // null: unknown place

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

// --- Events for torch's profilers: one per call, with ranges inside of it. While no profiler is on, a call only checks
// the thread's callbacks.

// Records the launch of a call as torch's own backends do, until the result is dropped: Kineto, HTA and Chakra read the
// event `record_param_comms`. `ranks` are the group's in the world; empty if it is the world.
std::shared_ptr<void> record_launch(const ::c10d::Backend& group, const std::vector<std::uint64_t>& ranks,
                                    const Job& job, const RecordedCall& call);

// Returns what begins a range for the profilers of this thread: "zcomm::encode", "zcomm::decode", "zcomm::decode_sum",
// "zcomm::decode_sum_encode", "zcomm::check", "zcomm::start_transfer" or "zcomm::wait_for_transfer". Null if none is
// on. On a GPU ranges are launch times.
BeginRange profilers_ranges();

}  // namespace zcomm::c10d_binding
