// Tests of the CUDA runtime on the host, which the other tests of the GPU side use.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <thread>

#include "cuda/owned.hpp"
#include "cuda_helpers.hpp"
#include "rank_process.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using test::capture;
using test::Stream;

// An operation that waits for the test.
struct Gate {
  std::atomic<bool> open{false};
  void block(cudaStream_t stream) {
    cuda_host::enqueue(stream, [this] {
      while (!open) std::this_thread::sleep_for(100us);
    });
  }
};

void append(cudaStream_t stream, std::vector<int>& values, int value) {
  REQUIRE(cuda_host::enqueue(stream, [&values, value] { values.push_back(value); }) == cudaSuccess);
}

struct RawEvent {
  RawEvent() { REQUIRE(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming) == cudaSuccess); }
  ~RawEvent() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
  cudaEvent_t handle = nullptr;
};

__global__ void add_kernel(int* values, int count, int summand) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] += summand;
}

}  // namespace

TEST_CASE("cuda_host: a stream runs its work in order, behind the host") {
  Gate gate;
  Stream stream;
  std::vector<int> order;
  gate.block(stream);
  for (int i = 0; i < 100; ++i) append(stream, order, i);
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  CHECK(cudaGetLastError() == cudaErrorNotReady);
  gate.open = true;
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  REQUIRE(order.size() == 100);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("cuda_host: streams run side by side, an event orders them") {
  Gate gate;
  Stream first;
  Stream second;
  RawEvent event;
  std::vector<int> order;
  std::atomic<bool> side_by_side = false;
  gate.block(first);
  append(first, order, 1);
  REQUIRE(cudaEventRecord(event, first) == cudaSuccess);
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  cuda_host::enqueue(second, [&] { side_by_side = true; });
  REQUIRE(cudaStreamWaitEvent(second, event) == cudaSuccess);
  append(second, order, 2);
  while (!side_by_side) std::this_thread::yield();
  // The wait has captured the record that was there: a later one changes nothing.
  Gate never_in_time;
  never_in_time.block(first);
  REQUIRE(cudaEventRecord(event, first) == cudaSuccess);
  gate.open = true;
  CHECK(cudaStreamSynchronize(second) == cudaSuccess);
  CHECK(order == std::vector<int>{1, 2});
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  never_in_time.open = true;
  CHECK(cudaEventSynchronize(event) == cudaSuccess);
}

TEST_CASE("cuda_host: kernels, copies and the device of a stream") {
  const CudaDeviceGuard device(3);
  const int count = 1000;
  {
    Stream stream;
    test::DeviceArray<int> values(count);
    values.set(std::vector<int>(count, 5), stream);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(8);
    config.blockDim = dim3(128);
    config.stream = stream;
    CHECK(cudaLaunchKernelEx(&config, add_kernel, values.data(), count, 2) == cudaSuccess);
    CHECK(values.get(stream) == std::vector<int>(count, 7));
    const CudaDeviceGuard other(0);
    CHECK(cudaLaunchKernelEx(&config, add_kernel, values.data(), count, 2) == cudaErrorInvalidResourceHandle);
    RawEvent event;
    CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
  }
  CHECK(cudaSetDevice(8) == cudaErrorInvalidDevice);
  static_cast<void>(cudaGetLastError());
}

// Skipped by itself: a case below runs it in a process of its own. The kernel gives a thread the number of one that has
// ended, if it may be asked for that. The stream is never destroyed, so its thread runs until the process ends.
// tests/gpu/stand_in/test_rehearsal.py has other processes.
TEST_CASE("cuda_host: what of memory may be exported, and by whom it may be opened") {
  constexpr std::size_t kBytes = std::size_t{1} << 21;
  std::byte *whole = nullptr, *odd = nullptr;
  void* opened = nullptr;
  REQUIRE(cudaMalloc(&whole, kBytes) == cudaSuccess);
  REQUIRE(cudaMalloc(&odd, 100) == cudaSuccess);
  std::fill(whole, whole + kBytes, std::byte{7});
  cudaIpcMemHandle_t handle;
  CHECK(cudaIpcGetMemHandle(&handle, whole + 4096) == cudaErrorInvalidValue);
  CHECK(cudaIpcGetMemHandle(&handle, odd) == cudaErrorInvalidValue);
  for (int i = 0; i < 2; ++i) REQUIRE(cudaIpcGetMemHandle(&handle, whole) == cudaSuccess);
  CHECK(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) == cudaErrorInvalidContext);
  CHECK(cudaIpcOpenMemHandle(&opened, handle, 0) == cudaErrorInvalidValue);
  CHECK(cudaIpcCloseMemHandle(whole) == cudaErrorInvalidValue);
  CHECK(std::all_of(whole, whole + kBytes, [](std::byte byte) { return byte == std::byte{7}; }));
  CHECK(cudaFree(whole) == cudaSuccess);
  CHECK(cudaIpcGetMemHandle(&handle, whole) == cudaErrorInvalidValue);
  CHECK(cudaFree(odd) == cudaSuccess);
  static_cast<void>(cudaGetLastError());
}

// Skipped by default: a case below runs it in a separate process.
TEST_CASE("a stream whose thread has the number of an earlier one" * doctest::skip()) {
  pid_t earlier = 0;
  pid_t number = -1;
  for (int attempt = 0; attempt < 200 && number != earlier; ++attempt) {
    std::thread([&] { earlier = gettid(); }).join();
    std::ofstream("/proc/sys/kernel/ns_last_pid") << earlier - 1;
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    test::DeviceArray<int> values(32);
    values.set(std::vector<int>(32), stream);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32);
    config.stream = stream;
    REQUIRE(cudaLaunchKernelEx(&config, add_kernel, values.data(), 32, 1) == cudaSuccess);
    cuda_host::enqueue(stream, [&] { number = gettid(); });
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  }
  if (number != earlier) MESSAGE("no stream has such a thread: this shows nothing");
}

TEST_CASE("cuda_host: what a stream's thread holds when the process ends is no leak") {
  CHECK(test::outcome_of(test::spawn_case("a stream whose thread has the number of an earlier one", {})) ==
        "ends well");
}

TEST_CASE("cuda_host: a captured graph runs when it is launched, forks and joins included") {
  Stream origin;
  Stream fork;
  RawEvent forked;
  RawEvent joined;
  std::vector<int> order;
  cudaGraphExec_t graph = capture(origin, [&] {
    append(origin, order, 1);
    REQUIRE(cudaEventRecord(forked, origin) == cudaSuccess);
    REQUIRE(cudaStreamWaitEvent(fork, forked) == cudaSuccess);
    CHECK(is_capturing({fork}));
    append(fork, order, 2);
    REQUIRE(cudaEventRecord(joined, fork) == cudaSuccess);
    REQUIRE(cudaStreamWaitEvent(origin, joined) == cudaSuccess);
    append(origin, order, 3);
  });
  CHECK_FALSE(is_capturing({origin}));
  CHECK_FALSE(is_capturing({fork}));
  CHECK(order.empty());
  CHECK(cudaStreamWaitEvent(fork, joined) == cudaErrorCapturedEvent);
  REQUIRE(cudaGraphLaunch(graph, origin) == cudaSuccess);
  REQUIRE(cudaGraphLaunch(graph, fork) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(fork) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(origin) == cudaSuccess);
  CHECK(order == std::vector<int>{1, 2, 3, 1, 2, 3});
  CHECK(cudaGraphExecDestroy(graph) == cudaSuccess);
}

TEST_CASE("cuda_host: what a capture forbids breaks it") {
  Stream origin;
  Stream fork;
  Stream outside;
  RawEvent event;
  RawEvent recorded_outside;
  REQUIRE(cudaEventRecord(recorded_outside, outside) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(outside) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  const auto breaks = [&](cudaStreamCaptureMode mode, auto&& call) {
    REQUIRE(cudaStreamBeginCapture(origin, mode) == cudaSuccess);
    const cudaError_t during = call();
    const cudaError_t at_end = cudaStreamEndCapture(origin, &graph);
    CHECK(graph == nullptr);
    static_cast<void>(cudaGetLastError());
    return std::pair(during, at_end);
  };
  const std::pair forbidden(cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated);
  const auto thread_local_mode = cudaStreamCaptureModeThreadLocal;
  void* memory = nullptr;
  CHECK(breaks(thread_local_mode, [&] { return cudaMalloc(&memory, 1); }) == forbidden);
  CHECK(breaks(thread_local_mode, [&] { return cudaStreamSynchronize(origin); }) == forbidden);
  CHECK(breaks(thread_local_mode, [&] { return cudaEventQuery(recorded_outside); }) == forbidden);
  CHECK(breaks(thread_local_mode, [&] { return cudaStreamWaitEvent(origin, recorded_outside); }) ==
        std::pair(cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureInvalidated));
  cudaLaunchConfig_t config{.gridDim = dim3(1), .blockDim = dim3(1)};
  config.stream = origin;
  const auto launch = [&] { return cudaLaunchKernelEx(&config, add_kernel, static_cast<int*>(nullptr), 0, 0); };
  cuda_host::unload_kernels();
  CHECK(breaks(thread_local_mode, launch) == forbidden);
  REQUIRE(launch() == cudaSuccess);
  REQUIRE(cudaGraphExecDestroy(capture(origin, [&] { CHECK(launch() == cudaSuccess); })) == cudaSuccess);
  const auto elsewhere = [&] {
    cudaError_t result = cudaSuccess;
    std::thread([&] { result = cudaMalloc(&memory, 1); }).join();
    return result;
  };
  CHECK(breaks(cudaStreamCaptureModeGlobal, elsewhere) == forbidden);
  const auto unjoined = [&] {
    cudaEventRecord(event, origin);
    cudaStreamWaitEvent(fork, event);
    return cuda_host::enqueue(fork, [] {});
  };
  CHECK(breaks(thread_local_mode, unjoined) == std::pair(cudaSuccess, cudaErrorStreamCaptureUnjoined));

  // Another thread may allocate beside a thread-local capture, and so may one that says it knows.
  REQUIRE(cudaStreamBeginCapture(origin, thread_local_mode) == cudaSuccess);
  CHECK(elsewhere() == cudaSuccess);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  CHECK(cudaEventQuery(recorded_outside) == cudaSuccess);
  REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  REQUIRE(cudaStreamEndCapture(origin, &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaFree(memory) == cudaSuccess);
}

TEST_CASE("cuda: a stream waits for another without the host") {
  cudaStream_t earlier = nullptr;
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&earlier) == cudaSuccess);
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  std::promise<void> gate;
  int value = 0;
  int seen = 0;
  REQUIRE(cuda_host::enqueue(earlier, [&] { gate.get_future().wait(), value = 1; }) == cudaSuccess);
  wait_for({stream}, {earlier});  // returns although `earlier` is stuck
  REQUIRE(cuda_host::enqueue(stream, [&] { seen = value; }) == cudaSuccess);
  gate.set_value();
  synchronize({stream});
  CHECK(seen == 1);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaStreamDestroy(earlier) == cudaSuccess);
}

TEST_CASE("cuda: a driver that is too old, and a GPU that nothing was built for, are told with what helps") {
  CHECK_THROWS_WITH_AS(check_cuda(cudaErrorInsufficientDriver, "launch"),
                       doctest::Contains("built with CUDA 13.0: update the driver"), Error);
  CHECK_THROWS_WITH_AS(check_cuda(cudaErrorNoKernelImageForDevice, "launch"),
                       doctest::Contains("built for compute capabilities host: install it with that of this GPU"),
                       Error);
  CHECK_THROWS_WITH_AS(check_cuda(cudaErrorLaunchFailure, "launch"),
                       "CUDA could not launch: cudaErrorLaunchFailure (cudaErrorLaunchFailure)", Error);
}

TEST_CASE("cuda: what the library says about devices and streams") {
  CHECK(cuda_toolkit() == "13.0");
  CHECK_FALSE(cuda_targets().empty());
  CHECK(cuda_device_count() == 8);
  cuda_host::set_device_count(0);
  CHECK(cuda_device_count() == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  cuda_host::set_device_count(8);
  {
    const CudaDeviceGuard guard(5);
    int device = 0;
    cudaGetDevice(&device);
    CHECK(device == 5);
  }
  int device = 1;
  cudaGetDevice(&device);
  CHECK(device == 0);
  CHECK_THROWS_WITH_AS(CudaDeviceGuard(8), doctest::Contains("make device 8 the current one"), Error);

  Stream stream;
  Gate gate;
  gate.block(stream);
  std::thread opener([&] {
    std::this_thread::sleep_for(10ms);
    gate.open = true;
  });
  synchronize(stream.view());
  CHECK(gate.open);
  opener.join();
}

}  // namespace zcomm
