// Jobs of the host codec as tasks of its threads.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/checks.hpp"
#include "codec/cpu/kernels.hpp"
#include "host/thread_pool.hpp"
#include "zcomm/codec.hpp"

namespace zcomm::cpu {

// Elements per task: enough to amortize scheduling, few enough to balance the load. Large calls get large tasks,
// because the first values of a task are not prefetched. Both are multiples of the tile.
inline constexpr std::int64_t kMinTaskElements = 32768;
inline constexpr std::int64_t kMaxTaskElements = 524288;
inline constexpr std::int64_t kTasksPerThread = 8;

// Sets the floating-point mode that kernels need: rounding to nearest even, with subnormals. The caller's thread may
// use another mode (torch.set_flush_denormal).
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

inline std::int64_t num_elements(const Encode& job) { return job.values.num_elements; }
inline std::int64_t num_elements(const Decode& job) { return job.values.num_elements; }
inline std::int64_t num_elements(const DecodeSum& job) { return job.values.num_elements; }
inline std::int64_t num_elements(const DecodeSumEncode& job) { return job.num_elements; }

// Returns the elements per task: at most `elements`, and whole blocks if the job writes a wire.
template <class Job>
std::int64_t task_elements(const Job& job, std::int64_t elements) {
  if constexpr (requires { job.format; }) {
    if (job.format.has_scales()) return elements / job.format.block_size * job.format.block_size;
  }
  return elements;
}

template <class Job>
std::int64_t task_elements(std::span<const Job> jobs) {
  std::int64_t all = 0;
  for (const Job& job : jobs) all += num_elements(job);
  const std::int64_t of_thread = all / num_threads() / kTasksPerThread / kTileElements * kTileElements;
  return std::clamp(of_thread, kMinTaskElements, kMaxTaskElements);
}

// Checks all jobs, then calls run(job, begin, count) for element ranges that cover them, in parallel.
template <class Job, class Run>
void run_jobs(std::span<const Job> jobs, const Run& run) {
  for (const Job& job : jobs) check(job);
  thread_local std::vector<std::int64_t> ends;  // running count of tasks; kept to avoid allocation
  ends.clear();
  const std::int64_t elements = task_elements(jobs);
  std::int64_t num_tasks = 0;
  for (const Job& job : jobs) {
    const std::int64_t of_task = task_elements(job, elements);
    num_tasks += (num_elements(job) + of_task - 1) / of_task;
    ends.push_back(num_tasks);
  }
  parallel_for(num_tasks, [&run, jobs, elements, ends = std::span<const std::int64_t>(ends)](std::int64_t task) {
    const auto end = std::upper_bound(ends.begin(), ends.end(), task);
    const Job& job = jobs[static_cast<std::size_t>(end - ends.begin())];
    const std::int64_t first_task = end == ends.begin() ? 0 : *(end - 1);
    const std::int64_t of_task = task_elements(job, elements), begin = (task - first_task) * of_task;
    const DefaultFloatEnvironment environment;
    run(job, begin, std::min(of_task, num_elements(job) - begin));
  });
}

}  // namespace zcomm::cpu
