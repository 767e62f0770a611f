// Streams, device memory and NCCL ranks for tests of the GPU side, over the runtime and the NCCL of tests/cuda_host.
#pragma once

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_host.hpp"
#include "nccl_host.hpp"
#include "ranks.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::test {

inline void require_cuda(cudaError_t result) {
  if (result != cudaSuccess) throw Error(cudaGetErrorName(result));
}

// Waits until the counts have not changed for a while: abandoned resources are freed on detached threads.
inline cuda_host::Counts settled_counts() {
  cuda_host::Counts counts = cuda_host::counts();
  for (int unchanged = 0; unchanged < 100;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const cuda_host::Counts now = cuda_host::counts();
    unchanged = now == counts ? unchanged + 1 : 0;
    counts = now;
  }
  return counts;
}

// Waits at most ten seconds until the counts are those of before: abandoned resources may be freed late.
inline cuda_host::Counts counts_back_at(const cuda_host::Counts& before) {
  const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (cuda_host::counts() != before && std::chrono::steady_clock::now() < latest) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return cuda_host::counts();
}

// Checks that a test has left nothing behind and has done nothing that NCCL forbids.
struct NoTraces {
  ~NoTraces() {
    const cuda_host::Counts after = counts_back_at(before);
    CHECK(nccl_host_live_communicators() == communicators_before);
    CHECK(after.streams == before.streams);
    CHECK(after.events == before.events);
    CHECK(after.allocations == before.allocations);
    CHECK(after.graphs == before.graphs);
    CHECK(std::string(nccl_host_take_misuse()) == "");
    CHECK(cuda_host::num_bytes_written_after_free() == written_before);
  }
  cuda_host::Counts before = settled_counts();
  int communicators_before = nccl_host_live_communicators();
  std::int64_t written_before = cuda_host::num_bytes_written_after_free();
};

class Stream {
 public:
  Stream() { require_cuda(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return handle_; }
  StreamView view() const { return {handle_}; }

 private:
  cudaStream_t handle_ = nullptr;
};

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) { require_cuda(cudaMalloc(&data_, size * sizeof(T))); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  std::size_t size() const { return size_; }
  T* data() const { return data_; }
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(data_); }

  void set(const std::vector<T>& values, cudaStream_t stream) const {
    // Held by the stream, so that the caller need not wait.
    const auto held = std::make_shared<const std::vector<T>>(values);
    require_cuda(cuda_host::enqueue(stream, [held, data = data_] { std::copy(held->begin(), held->end(), data); }));
  }
  std::vector<T> get(cudaStream_t stream) const {
    std::vector<T> values(size_);
    require_cuda(cudaMemcpyAsync(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost, stream));
    require_cuda(cudaStreamSynchronize(stream));
    return values;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

// Captures a graph of the work that body() queues on `stream`.
template <class Body>
cudaGraphExec_t capture(cudaStream_t stream, Body&& body) {
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    body();
  } catch (...) {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    throw;
  }
  cudaGraph_t graph = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaGraphInstantiate(&exec, graph));
  require_cuda(cudaGraphDestroy(graph));
  return exec;
}

// Makes a communicator as the Python bindings do.
inline std::unique_ptr<Communicator> make_cuda_communicator(const std::vector<int>& node_ids, std::size_t chunk_bytes,
                                                            NcclOptions options) {
  return make_nccl_communicator(Topology(node_ids), std::move(options), chunk_bytes);
}

// Calls body(rank, options) on one thread and device per rank.
template <class Body>
void run_nccl_ranks(int size, Body&& body) {
  const NcclUniqueId id = make_nccl_unique_id();
  run_ranks(size, [&](int rank) {
    const CudaDeviceGuard device(rank);
    NcclOptions options;
    options.unique_id = id;
    options.rank = rank;
    options.size = size;
    options.connect_timeout = std::chrono::seconds(60);
    body(rank, options);
  });
}

}  // namespace zcomm::test
