// Buffer of floats of a rank: on its GPU in a build with CUDA that finds one, else on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "zcomm/zcomm.hpp"

#ifdef ZCOMM_EXAMPLE_CUDA
#include <cuda_runtime.h>

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class Buffer {
 public:
  explicit Buffer(const std::vector<float>& values) : size_(values.size()), on_gpu_(zcomm::cuda_device_count() > 0) {
    if (!on_gpu_) {
      host_ = values;
      return;
    }
    check(cudaMalloc(&data_, size_ * sizeof(float)));
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice));
  }
  ~Buffer() {
    if (on_gpu_) cudaFree(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Waits for the default stream.
  std::vector<float> read() const {
    if (!on_gpu_) return host_;
    std::vector<float> values(size_);
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost));
    return values;
  }

  zcomm::TensorView view() {
    void* data = on_gpu_ ? data_ : host_.data();
    return {static_cast<std::byte*>(data), static_cast<std::int64_t>(size_), zcomm::DType::float32};
  }

 private:
  const std::size_t size_;
  const bool on_gpu_;
  std::vector<float> host_;
  void* data_ = nullptr;
};

#else

class Buffer {
 public:
  explicit Buffer(std::vector<float> values) : values_(std::move(values)) {}

  const std::vector<float>& read() const { return values_; }

  zcomm::TensorView view() {
    return {reinterpret_cast<std::byte*>(values_.data()), static_cast<std::int64_t>(values_.size()),
            zcomm::DType::float32};
  }

 private:
  std::vector<float> values_;
};

#endif
