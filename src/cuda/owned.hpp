// Owners of CUDA memory and events.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/check.hpp"

namespace zcomm {

// Device memory. Freeing it waits for the device.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t num_bytes) {
    const RelaxedCapture relaxed;
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, num_bytes),
               ("allocate " + std::to_string(num_bytes) + " bytes of GPU memory").c_str());
    data_ = static_cast<std::byte*>(data);
  }
  ~DeviceBytes() {
    const RelaxedCapture relaxed;
    static_cast<void>(cudaFree(data_));
    static_cast<void>(cudaGetLastError());
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

// Pinned host memory that the device can read and write at the same address.
class PinnedBytes {
 public:
  explicit PinnedBytes(std::size_t num_bytes) : size_(num_bytes) {
    const RelaxedCapture relaxed;
    void* data = nullptr;
    check_cuda(cudaMallocHost(&data, num_bytes),
               ("allocate " + std::to_string(num_bytes) + " bytes of pinned memory").c_str());
    data_ = static_cast<std::byte*>(data);
  }
  ~PinnedBytes() {
    const RelaxedCapture relaxed;
    static_cast<void>(cudaFreeHost(data_));
    static_cast<void>(cudaGetLastError());
  }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::byte* data_ = nullptr;
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
    const RelaxedCapture relaxed;
    check_cuda(cudaEventSynchronize(event_), "wait for an event");
  }
  // Throws where the work failed: "could not `what`".
  bool is_over(const char* what = "query an event") const {
    const RelaxedCapture relaxed;
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
