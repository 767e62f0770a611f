// CUDA's return codes as exceptions, and owners of its memory and events.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"

namespace zcomm {

// Returns advice that CUDA's own message lacks; empty if there is none.
std::string remedy(cudaError_t result);

// Throws Error unless `result` is success. `what` names the attempted action.
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // so that the caller's next check does not report it again
  throw Error(std::string("CUDA could not ") + what + ": " + cudaGetErrorString(result) + " (" +
              cudaGetErrorName(result) + ")" + remedy(result));
}

inline cudaStream_t as_cuda(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

// Device memory or, if `is_pinned`, host memory that the device can read and write at the same address. Freeing device
// memory waits for the device.
template <bool is_pinned>
class CudaBytes {
 public:
  explicit CudaBytes(std::size_t num_bytes) : size_(num_bytes) {
    const RelaxedCaptureGuard relaxed;
    const std::string what =
        "allocate " + std::to_string(num_bytes) + " bytes of " + (is_pinned ? "pinned" : "GPU") + " memory";
    void* data = nullptr;
    check_cuda(is_pinned ? cudaMallocHost(&data, num_bytes) : cudaMalloc(&data, num_bytes), what.c_str());
    data_ = static_cast<std::byte*>(data);
  }
  ~CudaBytes() {
    const RelaxedCaptureGuard relaxed;
    static_cast<void>(is_pinned ? cudaFreeHost(data_) : cudaFree(data_));
    static_cast<void>(cudaGetLastError());
  }
  CudaBytes(const CudaBytes&) = delete;
  CudaBytes& operator=(const CudaBytes&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::byte* data_ = nullptr;
};
using DeviceBytes = CudaBytes<false>;
using PinnedBytes = CudaBytes<true>;

// Stream of the current device, of the highest priority: what all ranks wait for goes first.
class CudaStream {
 public:
  CudaStream() {
    int least = 0;
    int greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "tell the priorities of streams");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "create a stream");
  }
  ~CudaStream() {
    static_cast<void>(cudaStreamDestroy(stream_));
    static_cast<void>(cudaGetLastError());
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  StreamView view() const { return {stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
};

// CUDA event: marks the work on a stream when it was recorded. An event that was never recorded is over.
class Event {
 public:
  Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event"); }
  ~Event() {
    static_cast<void>(cudaEventDestroy(event_));
    static_cast<void>(cudaGetLastError());
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamView stream) { check_cuda(cudaEventRecord(event_, as_cuda(stream)), "record an event"); }
  void make_wait(StreamView stream) const {
    check_cuda(cudaStreamWaitEvent(as_cuda(stream), event_, 0), "make a stream wait");
  }
  // Blocks the host.
  void wait() const {
    const RelaxedCaptureGuard relaxed;
    check_cuda(cudaEventSynchronize(event_), "wait for an event");
  }
  // Throws where the work failed: "could not `what`".
  bool is_over(const char* what = "query an event") const {
    const RelaxedCaptureGuard relaxed;
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check_cuda(result, what);
    return true;
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace zcomm
