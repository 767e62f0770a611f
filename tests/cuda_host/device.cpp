// Devices, memory and errors of the CUDA runtime on the host.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "runtime.hpp"

namespace cuda_host {
namespace {

constexpr std::align_val_t kAlignment{256};

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
std::atomic<int> num_devices{8};
std::atomic<std::int64_t> created{0};

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
    ZCOMM_NAME(cudaErrorNoDevice)
    ZCOMM_NAME(cudaErrorInvalidDevice)
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
      *value = 9;
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
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  *data = ::operator new(std::max<std::size_t>(num_bytes, 1), kAlignment, std::nothrow);
  if (*data == nullptr) return report(cudaErrorMemoryAllocation);
  count(&Counts::allocations, 1);
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  // Work that uses the memory may still be queued: the real one waits for the device, too.
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return error;
  ::operator delete(data, kAlignment);
  count(&Counts::allocations, -1);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, std::size_t num_bytes) { return cudaMalloc(data, num_bytes); }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
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
  return enqueue(stream, [=] {
    if (num_bytes > 0) std::memset(target, value, num_bytes);
  });
}
