// What tests ask of the CUDA runtime on the host beyond the runtime's own functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "cuda_runtime.h"

namespace cuda_host {

// Eight unless set.
void set_device_count(int count);

// Major compute capability of all devices. 9 unless set.
void set_compute_major(int major);

// Every operation of every stream waits a random time up to `longest` first; zero, the initial value, for none. Shakes
// out missing waits. Also set by CUDA_HOST_DELAY_US at the first use of a stream.
void set_delays(std::uint32_t seed, std::chrono::microseconds longest);

// How many operations a device takes ahead of what it has done. Whoever submits one more blocks, as with CUDA's own
// launch queue. 1024 unless set.
void set_queue_limit(int num_operations);

// Lets the next creation of a stream fail.
void fail_next_stream();

// Streams that are made from now on share so many hardware queues of their device, in turn; 0, the initial value, for
// one each. A queue starts its operations in the order in which they were submitted: one that waits holds up those of
// other streams.
void set_hardware_queues(int count);

// Host time of a kernel launch, a copy or a fill. 0 unless set.
void set_launch_cost(std::chrono::nanoseconds time);

// From now on every operation that allocates, synchronizes, launches or asks reports cudaErrorLaunchFailure, as after
// an illegal access; false ends that.
void set_sticky_error(bool there);

// While true, cudaEventQuery does not return, as where another thread holds a lock of CUDA's. The second function:
// calls that it has kept so far.
void keep_event_queries(bool keeps);
int num_kept_event_queries();

// Events and streams destroyed while another device was current, which gets a context then.
int num_destroyed_elsewhere();

// Queues `work` as one operation; adds it to the graph if the stream is capturing.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

// For a stream that is capturing: at each launch of the graph the operation is what make() returns then.
cudaError_t enqueue_made(cudaStream_t stream, std::function<std::function<void()>()> make);

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

// Calls of the process so far.
struct Calls {
  std::int64_t launches = 0;    // kernels, copies, fills
  std::int64_t records = 0;     // of events
  std::int64_t waits = 0;       // of streams for events
  std::int64_t host_waits = 0;  // synchronizations, and submissions that found the launch queue full
};
Calls calls();

// The length of the longest chain of dependent work behind which the stream's next work comes: kernels, and NCCL's
// groups. Beside matrix products that leave no multiprocessor free, each link of it waits until one of them ends.
// Copies and fills wait for none.
std::int64_t num_products(cudaStream_t stream);

// Adds a link to the chain: called for work that is no kernel of the runtime's, but takes multiprocessors.
void wait_for_product(cudaStream_t stream);

// The memory that holds an address, as it was allocated; nothing if none does.
struct Allocation {
  const void* data = nullptr;
  std::size_t num_bytes = 0;
};
Allocation find_allocation(const void* address);

// From now on kernels of one parameter are run by this, on the threads of their streams, and not as the C++ that they
// are: see tests/ptx.
void set_kernel_runner(KernelRunner runner);

// As at the start of a process: the next launch of each kernel loads it.
void unload_kernels();

// Bytes that work wrote to memory after it was freed. Freed memory keeps a pattern for a while, which is looked at
// here.
std::int64_t num_bytes_written_after_free();

}  // namespace cuda_host
