// Streams and events of the CUDA runtime on the host.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <random>

#ifdef __SANITIZE_ADDRESS__
#include <pthread.h>
#include <sanitizer/lsan_interface.h>
#endif

#include "runtime.hpp"

namespace cuda_host {
namespace {

// Shows a thread's stack, at whose end its thread-local values are, to the leak checker. That of GCC 12 takes a thread
// for an earlier one that has ended, if Linux gave both the same number, and calls what it holds a leak.
class StackForLeakChecker {
#ifdef __SANITIZE_ADDRESS__
 public:
  StackForLeakChecker() {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin_, &num_bytes_);
    pthread_attr_destroy(&attributes);
    __lsan_register_root_region(begin_, num_bytes_);
  }
  ~StackForLeakChecker() { __lsan_unregister_root_region(begin_, num_bytes_); }

 private:
  void* begin_ = nullptr;
  std::size_t num_bytes_ = 0;
#endif
};

std::atomic<std::uint32_t> delay_seed{1};
std::atomic<std::int64_t> longest_delay_us{[] {
  const char* text = std::getenv("CUDA_HOST_DELAY_US");
  return text == nullptr ? 0L : std::atol(text);
}()};

std::atomic<int> queue_limit{1024};
std::atomic<bool> next_stream_fails{false};
std::atomic<bool> keeps_event_queries{false};
std::atomic<int> num_kept{0};
std::atomic<int> num_elsewhere{0};
constexpr int kMaxDevices = 64;
std::atomic<std::int64_t> pending[kMaxDevices]{};

// Every stream and the blocks of flags: reachable for leak checkers.
struct Registry {
  std::mutex mutex;
  std::vector<cudaStream_t> streams;
  std::map<int, cudaStream_t> default_streams;
  std::vector<Flag*> flags;
  int num_queues = 0;  // of each device
  std::map<int, std::vector<HardwareQueue*>> queues;
  std::map<int, std::size_t> num_queued_streams;
};
Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

// Under the registry's mutex. Of the stream that is made next on a device, or null.
HardwareQueue* next_queue(int device) {
  const auto limit = static_cast<std::size_t>(registry().num_queues);
  if (limit == 0) return nullptr;
  std::vector<HardwareQueue*>& queues = registry().queues[device];
  if (queues.size() < limit) queues.push_back(new HardwareQueue);
  return queues[registry().num_queued_streams[device]++ % limit];
}

// Under the registry's mutex.
cudaStream_t make_stream(int device) {
  const auto index = static_cast<std::uint32_t>(registry().streams.size());
  return registry().streams.emplace_back(new CUstream_st(device, index));
}

}  // namespace

void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  const timespec longest{0, 10'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &longest, nullptr, 0);
}

void nap(std::chrono::microseconds time) {
  const timespec left{0, std::chrono::nanoseconds(time).count()};
  syscall(SYS_nanosleep, &left, nullptr);
}

Flag& Flag::make() {
  constexpr std::size_t kBlock = 256;
  thread_local Flag* block = nullptr;
  thread_local std::size_t used = kBlock;
  if (used == kBlock) {
    block = new Flag[kBlock];
    used = 0;
    const std::lock_guard lock(registry().mutex);
    registry().flags.push_back(block);
  }
  return block[used++];
}

void Flag::set() {
  state_.store(1, std::memory_order_release);
  futex_wake(state_);
}

void Flag::wait() {
  while (!is_set()) futex_wait(state_, 0);
}

std::atomic<std::int64_t>& pending_operations(int device) { return pending[device]; }

void set_queue_limit(int num_operations) { queue_limit = num_operations; }
void fail_next_stream() { next_stream_fails = true; }
void keep_event_queries(bool keeps) { keeps_event_queries = keeps; }
int num_kept_event_queries() { return num_kept; }
int num_destroyed_elsewhere() { return num_elsewhere; }

void wait_for_room(int device) {
  const auto is_full = [&] { return pending[device].load(std::memory_order_relaxed) >= queue_limit; };
  if (!is_full()) return;
  ++tally().host_waits;
  while (is_full()) nap(std::chrono::microseconds(100));
}

void set_hardware_queues(int count) {
  const std::lock_guard lock(registry().mutex);
  registry().num_queues = count;
  registry().queues.clear();
  registry().num_queued_streams.clear();
}

void set_delays(std::uint32_t seed, std::chrono::microseconds longest) {
  delay_seed = seed;
  longest_delay_us = longest.count();
}

cudaStream_t resolve(cudaStream_t stream) {
  const int device = current_device();
  if (stream == cudaStreamPerThread) {
    thread_local std::map<int, cudaStream_t> own;
    const std::lock_guard lock(registry().mutex);
    if (own[device] == nullptr) own[device] = make_stream(device);
    return own[device];
  }
  if (stream != nullptr && stream != cudaStreamLegacy) return stream;
  const std::lock_guard lock(registry().mutex);
  cudaStream_t& found = registry().default_streams[device];
  if (found == nullptr) found = make_stream(device);
  return found;
}

std::vector<cudaStream_t> streams_of(int device) {
  const std::lock_guard lock(registry().mutex);
  std::vector<cudaStream_t> found;
  for (cudaStream_t stream : registry().streams) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

}  // namespace cuda_host

using namespace cuda_host;

CUstream_st::CUstream_st(int on_device, std::uint32_t number)
    : device(on_device), index(number), queue_(next_queue(on_device)), newest_(new Operation), oldest_(newest_) {
  // Never joined: a stream that is stuck, as behind a rank that never comes, must not keep the process.
  std::thread([this] { work_off(); }).detach();
}

void CUstream_st::push(std::function<void()> work, Flag* flag, bool is_wait) {
  auto* operation = new Operation{std::move(work), flag, is_wait};
  if (queue_ != nullptr) operation->ticket = queue_->num_submitted.fetch_add(1, std::memory_order_relaxed);
  pending[device].fetch_add(1, std::memory_order_relaxed);
  Operation* previous = std::exchange(newest_, operation);
  previous->next.store(operation, std::memory_order_release);
  ++num_pushed_;
  queued_.fetch_add(1, std::memory_order_relaxed);
  futex_wake(queued_);
}

bool CUstream_st::is_idle() const {
  // Two loads: a query that finds work left must not come after the work that is done.
  return num_done_.load(std::memory_order_relaxed) == num_pushed_ &&
         num_done_.load(std::memory_order_acquire) == num_pushed_;
}

Flag& CUstream_st::mark() {
  Flag& flag = Flag::make();
  push(nullptr, &flag);
  return flag;
}

// Waits for its turn in the hardware queue, and lets the next one go.
void CUstream_st::start(const Operation& operation) {
  if (queue_ == nullptr) {
    if (operation.work) operation.work();
    return;
  }
  while (queue_->num_started.load(std::memory_order_relaxed) != operation.ticket) {
    nap(std::chrono::microseconds(20));
  }
  if (operation.work && operation.is_wait) operation.work();
  queue_->num_started.store(operation.ticket + 1, std::memory_order_relaxed);
  if (operation.work && !operation.is_wait) operation.work();
}

void CUstream_st::work_off() {
  [[maybe_unused]] thread_local const StackForLeakChecker stack;  // the first, so the last to end
  cudaSetDevice(device);
  std::minstd_rand random(delay_seed.load(std::memory_order_relaxed) + index);
  for (std::uint64_t num_done = 0;;) {
    const std::uint32_t seen = queued_.load(std::memory_order_relaxed);
    Operation* operation = oldest_->next.load(std::memory_order_acquire);
    if (operation == nullptr) {
      futex_wait(queued_, seen);
      continue;
    }
    delete std::exchange(oldest_, operation);
    if (const std::int64_t longest = longest_delay_us.load(std::memory_order_relaxed); longest > 0) {
      nap(std::chrono::microseconds(static_cast<std::int64_t>(random()) % longest));
    }
    const bool is_end = !operation->work && operation->flag == nullptr;
    start(*operation);
    pending[device].fetch_sub(1, std::memory_order_relaxed);
    if (is_end) return;
    operation->work = nullptr;
    // Before the flag: who saw it must not find the stream busy.
    num_done_.store(++num_done, std::memory_order_release);
    if (operation->flag != nullptr) operation->flag->set();
  }
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (next_stream_fails.exchange(false)) return report(cudaErrorMemoryAllocation);
  {
    const std::lock_guard lock(registry().mutex);
    *stream = make_stream(current_device());
  }
  count(&Counts::streams, 1);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return report(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(stream->mutex);
  if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
  if (stream->device != current_device()) ++num_elsewhere;
  stream->destroyed = &stream->mark();
  stream->push(nullptr);
  count(&Counts::streams, -1);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  if (is_broken()) return cudaErrorLaunchFailure;
  stream = resolve(stream);
  const std::lock_guard lock(stream->mutex);
  return stream->is_idle() ? cudaSuccess : report(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  if (is_broken()) return cudaErrorLaunchFailure;
  ++tally().host_waits;
  stream = resolve(stream);
  Flag* done = nullptr;
  {
    const std::lock_guard lock(stream->mutex);
    if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
    done = &stream->mark();
  }
  done->wait();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  ++tally().host_waits;
  std::vector<Flag*> pending;
  for (cudaStream_t stream : streams_of(current_device())) {
    const std::lock_guard lock(stream->mutex);
    pending.push_back(stream->destroyed ? stream->destroyed : &stream->mark());
  }
  for (Flag* flag : pending) flag->wait();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{.device = current_device()};
  count(&Counts::events, 1);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return report(cudaErrorInvalidResourceHandle);
  if (event->device != current_device()) ++num_elsewhere;
  delete event;
  count(&Counts::events, -1);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (keeps_event_queries) ++num_kept;
  while (keeps_event_queries) nap(std::chrono::milliseconds(1));
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  if (is_broken()) return cudaErrorLaunchFailure;
  const std::lock_guard lock(event->mutex);
  if (event->capture != nullptr) return report(cudaErrorCapturedEvent);
  return event->recorded == nullptr || event->recorded->is_set() ? cudaSuccess : report(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  ++tally().host_waits;
  Flag* recorded = nullptr;
  {
    const std::lock_guard lock(event->mutex);
    if (event->capture != nullptr) return report(cudaErrorCapturedEvent);
    recorded = event->recorded;
  }
  if (recorded != nullptr) recorded->wait();
  return cudaSuccess;
}
