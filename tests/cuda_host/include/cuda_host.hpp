// What tests ask of the CUDA runtime on the host beyond the runtime's own functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "cuda_runtime.h"

namespace cuda_host {

// Eight unless set.
void set_device_count(int count);

// Every operation of every stream waits a random time up to `longest` first; zero, the initial value, for none. Shakes
// out missing waits. Also set by CUDA_HOST_DELAY_US at the first use of a stream.
void set_delays(std::uint32_t seed, std::chrono::microseconds longest);

// Queues `work` as one operation; adds it to the graph if the stream is capturing.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

// Live objects of the process. Default streams do not count.
struct Counts {
  int streams = 0;
  int events = 0;
  int allocations = 0;
  int graphs = 0;  // instantiated or not

  bool operator==(const Counts&) const = default;
};
Counts counts();

// cudaMalloc, cudaEventCreate and cudaStreamCreate so far: what the steady state must not add to.
std::int64_t num_creations();

}  // namespace cuda_host
