#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

#include "host_torch.hpp"

namespace cuda_host::torch {
namespace {

constexpr std::int64_t kFirstOfPool = 101;

std::mutex mutex;  // of all below
std::map<std::int64_t, cudaStream_t> streams;
std::map<void*, int> event_numbers;
std::vector<std::string> lines;
std::int64_t num_from_pool = 0;
thread_local std::int64_t current = 0;

void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

std::string name(std::int64_t stream) { return "s" + std::to_string(stream); }

std::string name_of_event(void* event) {
  const std::lock_guard lock(mutex);
  return "e" +
         std::to_string(event_numbers.try_emplace(event, static_cast<int>(event_numbers.size()) + 1).first->second);
}

}  // namespace

cudaStream_t stream(std::int64_t number) {
  const std::lock_guard lock(mutex);
  if (number == 0) return nullptr;
  cudaStream_t& made = streams[number];
  if (made == nullptr) check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return made;
}

std::int64_t current_stream() { return current; }
void set_stream(std::int64_t number) { current = number; }

void log(const std::string& line) {
  const std::lock_guard lock(mutex);
  lines.push_back(line);
}

std::vector<std::string> take_log() {
  const std::lock_guard lock(mutex);
  return std::exchange(lines, {});
}

void restart_log() {
  const std::lock_guard lock(mutex);
  event_numbers.clear();
  lines.clear();
}

namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return at(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return at(0); }
  c10::Stream exchangeStream(c10::Stream next) const override { return at(std::exchange(current, next.id())); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high_priority) const override {
    std::int64_t number = 0;
    {
      const std::lock_guard lock(mutex);
      number = kFirstOfPool + num_from_pool++;
    }
    log("pool " + name(number) + (high_priority ? " high" : ""));
    return at(number);
  }
  void* getStreamNativeHandle(const c10::Stream handle) const override { return stream(handle.id()); }
  bool queryStream(const c10::Stream& handle) const override {
    return cudaStreamQuery(stream(handle.id())) == cudaSuccess;
  }
  void synchronizeStream(const c10::Stream& handle) const override {
    log("synchronize " + name(handle.id()));
    check(cudaStreamSynchronize(stream(handle.id())), "cudaStreamSynchronize");
  }

  void record(void** event, const c10::Stream& handle, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      cudaEvent_t made = nullptr;
      check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
      *event = made;
    }
    log("record " + name_of_event(*event) + " " + name(handle.id()));
    check(cudaEventRecord(static_cast<cudaEvent_t>(*event), stream(handle.id())), "cudaEventRecord");
  }
  void block(void* event, const c10::Stream& handle) const override {
    if (event == nullptr) return;
    log("block " + name(handle.id()) + " " + name_of_event(event));
    check(cudaStreamWaitEvent(stream(handle.id()), static_cast<cudaEvent_t>(event)), "cudaStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    log("query " + name_of_event(event));
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (error != cudaErrorNotReady) check(error, "cudaEventQuery");
    return error == cudaSuccess;
  }
  void synchronizeEvent(void* event) const override {
    log("synchronize " + name_of_event(event));
    check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    {
      const std::lock_guard lock(mutex);
      event_numbers.erase(event);
    }
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& handle) const override {
    log("record_stream " + name(handle.id()));
  }

 private:
  static c10::Device device() { return {c10::DeviceType::CUDA, 0}; }
  static c10::Stream at(std::int64_t number) { return c10::Stream(c10::Stream::UNSAFE, device(), number); }
};

const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

}  // namespace
}  // namespace cuda_host::torch
