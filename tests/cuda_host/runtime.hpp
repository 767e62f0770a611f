// Inside the CUDA runtime on the host: streams, events, captures.
//
// The point of real threads is that ThreadSanitizer sees a missing wait as a data race. So the runtime must order
// nothing that CUDA does not order: work of a stream comes after what its caller did before it queued it, after earlier
// work of the stream and after the events that the stream waited for; a host thread comes after what it synchronized
// with. Hence:
//  - Workers take no lock at all. A queue is a linked list whose links are stored with release by the caller and loaded
//    with acquire by the worker, never the other way round. They sleep in futexes, which order nothing.
//  - Nothing that both sides touch is reference-counted: the counts would order them. Streams and flags live as long as
//    the process; they are small.
//  - Locks are between host threads: one per stream and event, and one for captures, which costs nothing where none is
//    under way.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_host.hpp"

namespace cuda_host {

// Wakes threads that wait for `word` to change; the waiter returns after at most some milliseconds anyway.
void futex_wake(std::atomic<std::uint32_t>& word);
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen);
// Sleeps for less than a second. At std::this_thread::sleep_for ThreadSanitizer looks at every thread.
void nap(std::chrono::microseconds time);

// Set once, by a worker.
class Flag {
 public:
  static Flag& make();  // lives as long as the process

  void set();
  bool is_set() const { return state_.load(std::memory_order_acquire) != 0; }
  void wait();

 private:
  std::atomic<std::uint32_t> state_{0};
};

// Starts operations of several streams in the order in which they were submitted. Relaxed: it orders no memory.
struct HardwareQueue {
  std::atomic<std::uint64_t> num_submitted{0};
  std::atomic<std::uint64_t> num_started{0};
};

// Of one device: operations that it has not done.
std::atomic<std::int64_t>& pending_operations(int device);
// Blocks while the device's launch queue is full.
void wait_for_room(int device);

// Work, or a flag to set, or neither: the end of the stream.
struct Operation {
  std::function<void()> work;
  Flag* flag = nullptr;
  bool is_wait = false;      // of the stream for something else: its hardware queue waits, too
  std::uint64_t ticket = 0;  // in the hardware queue
  std::atomic<Operation*> next{nullptr};
};

// How much of each stream of a capture something comes after.
using Clock = std::map<cudaStream_t, std::uint64_t>;

// Guarded by captures_mutex().
struct Capture {
  unsigned long long id = 0;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread{};
  bool invalidated = false;
  bool ended = false;
  std::map<cudaStream_t, Clock> streams{};
  cudaGraph_t graph = nullptr;  // what is recorded, in the order of the calls, which respects every dependency
};

std::mutex& captures_mutex();

// Records `error` for cudaGetLastError().
cudaError_t report(cudaError_t error);

// Whether a capture forbids a call that allocates, synchronizes or queries; such a call breaks the capture.
bool forbidden_by_capture();

int current_device();
cudaStream_t resolve(cudaStream_t stream);  // default streams are those of the current device
std::vector<cudaStream_t> streams_of(int device);

void count(int Counts::* member, int change);

// Ends the export of memory, if there is one: this process has it for itself again. Others keep what they opened.
void withdraw(void* data);

// Whether the device is lost; reports it.
bool is_broken();
struct Tally {
  std::atomic<std::int64_t> launches{0};
  std::atomic<std::int64_t> records{0};
  std::atomic<std::int64_t> waits{0};
  std::atomic<std::int64_t> host_waits{0};
};
Tally& tally();
// Takes the host time of a launch.
void pay_for_launch();

}  // namespace cuda_host

struct CUstream_st {
  CUstream_st(int device, std::uint32_t index);

  // Under `mutex`, outside a capture.
  void push(std::function<void()> work, cuda_host::Flag* flag = nullptr, bool is_wait = false);
  // Under `mutex`. A flag that is set when all earlier work is done.
  cuda_host::Flag& mark();
  bool is_idle() const;  // under `mutex`

  const int device;
  const std::uint32_t index;
  std::mutex mutex;                       // host threads only
  cuda_host::Capture* capture = nullptr;  // guarded by captures_mutex(); changed under `mutex`, too
  cuda_host::Flag* destroyed = nullptr;   // set when all that was queued before is done
  std::int64_t products = 0;              // see num_products(); under `mutex`

 private:
  void work_off();
  void start(const cuda_host::Operation& operation);

  cuda_host::HardwareQueue* const queue_;  // null: one of its own
  cuda_host::Operation* newest_;           // of the callers
  cuda_host::Operation* oldest_;           // of the worker; the last one that it has run
  std::uint64_t num_pushed_ = 0;           // of the callers
  std::atomic<std::uint64_t> num_done_{0};
  std::atomic<std::uint32_t> queued_{0};  // to sleep on
};

struct CUevent_st {
  int device = 0;
  std::mutex mutex{};
  cuda_host::Flag* recorded = nullptr;    // by the last cudaEventRecord outside a capture
  cuda_host::Capture* capture = nullptr;  // of the last cudaEventRecord, if inside one
  cuda_host::Clock clock{};               // of that record
  std::int64_t products = 0;              // of the stream at that record
};
