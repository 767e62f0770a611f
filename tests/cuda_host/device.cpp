// Devices, memory and errors of the CUDA runtime on the host.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <new>

#include "runtime.hpp"

namespace cuda_host {
namespace {

// Whole pages can be exported to other processes: see ipc.cpp.
std::align_val_t alignment_of(std::size_t num_bytes) { return std::align_val_t{num_bytes % 4096 == 0 ? 4096u : 256u}; }

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
std::atomic<int> num_devices{8};
std::atomic<int> compute_major{9};
std::atomic<std::int64_t> created{0};
std::atomic<bool> broken{false};
std::atomic<std::int64_t> launch_cost_ns{0};
std::atomic<KernelRunner> runner{nullptr};

// What was freed stays as it is for a while, with this in each byte.
constexpr unsigned char kFreed = 0xdd;
constexpr std::size_t kMaxFreedBytes = std::size_t{64} << 20;

struct Memory {
  std::mutex mutex;
  std::map<void*, std::size_t> allocations;
  std::deque<std::pair<void*, std::size_t>> freed;
  std::size_t freed_bytes = 0;
  std::int64_t num_written = 0;
};
Memory& memory() {
  static auto& all = *new Memory;
  return all;
}

// Under the memory's mutex. Gives the oldest of what was freed back.
void give_back(Memory& all) {
  const auto [data, num_bytes] = all.freed.front();
  const auto* bytes = static_cast<const unsigned char*>(data);
  all.num_written += std::count_if(bytes, bytes + num_bytes, [](unsigned char byte) { return byte != kFreed; });
  ::operator delete(data, alignment_of(num_bytes));
  all.freed_bytes -= num_bytes;
  all.freed.pop_front();
}

struct Live {
  std::mutex mutex;
  Counts counts;
};
Live& live() {
  static auto& all = *new Live;
  return all;
}

}  // namespace

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int current_device() { return device_of_thread; }

void set_device_count(int count) { num_devices = count; }

void set_compute_major(int major) { compute_major = major; }

void count(int Counts::* member, int change) {
  if (change > 0 && member != &Counts::graphs) ++created;
  const std::lock_guard lock(live().mutex);
  live().counts.*member += change;
}

Counts counts() {
  const std::lock_guard lock(live().mutex);
  return live().counts;
}

std::int64_t num_creations() { return created; }

Tally& tally() {
  static auto& all = *new Tally;
  return all;
}

Calls calls() { return {tally().launches, tally().records, tally().waits, tally().host_waits}; }

bool is_broken() {
  if (!broken) return false;
  report(cudaErrorLaunchFailure);
  return true;
}

void set_sticky_error(bool there) { broken = there; }

void set_launch_cost(std::chrono::nanoseconds time) { launch_cost_ns = time.count(); }

void pay_for_launch() {
  ++tally().launches;
  const std::int64_t cost = launch_cost_ns;
  if (cost == 0) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(cost);
  while (std::chrono::steady_clock::now() < until) {
  }
}

Allocation find_allocation(const void* address) {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  auto next = all.allocations.upper_bound(const_cast<void*>(address));
  if (next == all.allocations.begin()) return {};
  const auto& [data, num_bytes] = *--next;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<const char*>(data));
  return offset < num_bytes ? Allocation{data, num_bytes} : Allocation{};
}

KernelRunner kernel_runner() { return runner.load(std::memory_order_relaxed); }
void set_kernel_runner(KernelRunner to) { runner = to; }

std::int64_t num_bytes_written_after_free() {
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  while (!all.freed.empty()) give_back(all);
  return all.num_written;
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define ZCOMM_NAME(name) \
  case name:             \
    return #name;
    ZCOMM_NAME(cudaSuccess)
    ZCOMM_NAME(cudaErrorInvalidValue)
    ZCOMM_NAME(cudaErrorMemoryAllocation)
    ZCOMM_NAME(cudaErrorInvalidConfiguration)
    ZCOMM_NAME(cudaErrorInsufficientDriver)
    ZCOMM_NAME(cudaErrorNoDevice)
    ZCOMM_NAME(cudaErrorInvalidDevice)
    ZCOMM_NAME(cudaErrorInvalidContext)
    ZCOMM_NAME(cudaErrorMapBufferObjectFailed)
    ZCOMM_NAME(cudaErrorNoKernelImageForDevice)
    ZCOMM_NAME(cudaErrorInvalidResourceHandle)
    ZCOMM_NAME(cudaErrorIllegalState)
    ZCOMM_NAME(cudaErrorNotReady)
    ZCOMM_NAME(cudaErrorLaunchFailure)
    ZCOMM_NAME(cudaErrorNotSupported)
    ZCOMM_NAME(cudaErrorStreamCaptureUnsupported)
    ZCOMM_NAME(cudaErrorStreamCaptureInvalidated)
    ZCOMM_NAME(cudaErrorStreamCaptureMerge)
    ZCOMM_NAME(cudaErrorStreamCaptureUnmatched)
    ZCOMM_NAME(cudaErrorStreamCaptureUnjoined)
    ZCOMM_NAME(cudaErrorStreamCaptureIsolation)
    ZCOMM_NAME(cudaErrorStreamCaptureImplicit)
    ZCOMM_NAME(cudaErrorCapturedEvent)
    ZCOMM_NAME(cudaErrorStreamCaptureWrongThread)
#undef ZCOMM_NAME
  }
  return "unknown";
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices;
  return *count > 0 ? cudaSuccess : report(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices) return report(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t num_bytes) {
  if (is_broken()) return cudaErrorLaunchFailure;
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  num_bytes = std::max<std::size_t>(num_bytes, 1);
  *data = ::operator new(num_bytes, alignment_of(num_bytes), std::nothrow);
  if (*data == nullptr) return report(cudaErrorMemoryAllocation);
  {
    const std::lock_guard lock(memory().mutex);
    memory().allocations[*data] = num_bytes;
  }
  count(&Counts::allocations, 1);
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  // Work that uses the memory may still be queued: the real one waits for the device, too.
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  Memory& all = memory();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(data);
  if (found == all.allocations.end()) return report(cudaErrorInvalidValue);
  withdraw(data);
  std::memset(data, kFreed, found->second);
  all.freed_bytes += found->second;
  all.freed.emplace_back(data, found->second);
  all.allocations.erase(found);
  while (all.freed_bytes > kMaxFreedBytes) give_back(all);
  count(&Counts::allocations, -1);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, std::size_t num_bytes) { return cudaMalloc(data, num_bytes); }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  pay_for_launch();
  return enqueue(stream, [=] {
    if (num_bytes > 0) std::memmove(target, source, num_bytes);
  });
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t num_bytes, cudaMemcpyKind kind) {
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureImplicit);
  if (const cudaError_t error = cudaMemcpyAsync(target, source, num_bytes, kind); error != cudaSuccess) return error;
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t num_bytes, cudaStream_t stream) {
  pay_for_launch();
  return enqueue(stream, [=] {
    if (num_bytes > 0) std::memset(target, value, num_bytes);
  });
}
