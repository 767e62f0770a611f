#include "cuda/owned.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {

std::string cuda_toolkit() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

std::string cuda_targets() { return ZCOMM_CUDA_TARGETS; }

std::string remedy(cudaError_t result) {
  if (result == cudaErrorInsufficientDriver) {
    return ". zcomm was built with CUDA " + cuda_toolkit() +
           ": update the driver to one for it, or install zcomm with an older nvcc in CUDACXX";
  }
  if (result == cudaErrorNoKernelImageForDevice) {
    return ". zcomm was built for compute capabilities " + cuda_targets() +
           ": install it with that of this GPU in CUDAARCHS, 80 or later";
  }
  return {};
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

CudaDeviceGuard::CudaDeviceGuard(int device) {
  check_cuda(cudaGetDevice(&previous_), "tell the current device");
  if (device != previous_) {
    check_cuda(cudaSetDevice(device), ("make device " + std::to_string(device) + " the current one").c_str());
  }
}

CudaDeviceGuard::~CudaDeviceGuard() {
  int current = previous_;
  // Skips a device that is current already: setting it would create its context.
  if (cudaGetDevice(&current) == cudaSuccess && current != previous_) static_cast<void>(cudaSetDevice(previous_));
}

RelaxedCaptureGuard::RelaxedCaptureGuard() {
  auto mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  previous_ = mode;
}

RelaxedCaptureGuard::~RelaxedCaptureGuard() {
  auto mode = static_cast<cudaStreamCaptureMode>(previous_);
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

std::uint64_t capture_of(StreamView stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check_cuda(cudaStreamGetCaptureInfo(as_cuda(stream), &status, &id), "tell whether a stream records a graph");
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

void wait_for(StreamView stream, StreamView earlier) {
  Event event;  // destroying it takes effect when the wait is over
  event.record(earlier);
  event.make_wait(stream);
}

void copy(std::byte* target, const std::byte* source, std::size_t num_bytes, StreamView stream) {
  check_cuda(cudaMemcpyAsync(target, source, num_bytes, cudaMemcpyDeviceToDevice, as_cuda(stream)), "copy");
}

void synchronize(StreamView stream) {
  check_cuda(cudaStreamSynchronize(as_cuda(stream)), "finish the work of a stream");
}

}  // namespace zcomm
