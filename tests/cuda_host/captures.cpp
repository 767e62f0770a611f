// What is queued on a stream of the CUDA runtime on the host, or recorded in a graph.
#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "runtime.hpp"

struct CUuserObject_st {
  CUuserObject_st(void* of, cudaHostFn_t by) : data(of), destroy(by) {}
  ~CUuserObject_st() { destroy(data); }
  CUuserObject_st(const CUuserObject_st&) = delete;
  CUuserObject_st& operator=(const CUuserObject_st&) = delete;

  void* data;
  cudaHostFn_t destroy;
};

// Makes the work of an operation, at each launch of the graph.
using MakeWork = std::function<std::function<void()>()>;

struct CUgraph_st {
  std::vector<MakeWork> operations;
  std::vector<std::shared_ptr<CUuserObject_st>> objects;
};

struct CUgraphExec_st {
  std::vector<MakeWork> operations;
  std::vector<std::shared_ptr<CUuserObject_st>> objects;
  cuda_host::Flag* launched = nullptr;  // set when the last launch is done
};

namespace cuda_host {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
std::atomic<int> num_captures{0};  // that are under way

// Guarded by captures_mutex(). Captures are kept: events may refer to them for as long as they like.
std::vector<Capture*>& all_captures() {
  static auto& all = *new std::vector<Capture*>;
  return all;
}

// Under the captures' mutex.
void advance(Capture& capture, cudaStream_t stream) { ++capture.streams[stream][stream]; }

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, step] : from) into[stream] = std::max(into[stream], step);
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.invalidated = true;
  return report(error);
}

}  // namespace

std::mutex& captures_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

bool forbidden_by_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed || num_captures.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(captures_mutex());
  bool forbidden = false;
  for (Capture* capture : all_captures()) {
    if (capture->ended || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool concerned = capture->thread == std::this_thread::get_id() ||
                           (capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal);
    if (!concerned) continue;
    capture->invalidated = true;
    forbidden = true;
  }
  return forbidden;
}

namespace {

// A stream that records a graph submits nothing.
void wait_for_room_of(cudaStream_t stream) {
  {
    const std::lock_guard lock(stream->mutex);
    if (stream->capture != nullptr) return;
  }
  wait_for_room(stream->device);
}

// Under the stream's mutex.
cudaError_t record(cudaStream_t stream, MakeWork make) {
  const std::lock_guard lock(captures_mutex());
  Capture& capture = *stream->capture;
  if (capture.invalidated) return report(cudaErrorStreamCaptureInvalidated);
  capture.graph->operations.push_back(std::move(make));
  advance(capture, stream);
  return cudaSuccess;
}

}  // namespace

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (is_broken()) return cudaErrorLaunchFailure;
  stream = resolve(stream);
  wait_for_room_of(stream);
  const std::lock_guard lock(stream->mutex);
  if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) {
    return record(stream, [work = std::move(work)] { return [&work] { work(); }; });
  }
  stream->push(std::move(work));
  return cudaSuccess;
}

cudaError_t enqueue_made(cudaStream_t stream, MakeWork make) {
  stream = resolve(stream);
  const std::lock_guard lock(stream->mutex);
  if (stream->capture == nullptr) return report(cudaErrorIllegalState);
  return record(stream, std::move(make));
}

namespace {

struct Loaded {
  std::mutex mutex;
  std::unordered_set<const void*> kernels;
};

Loaded& loaded() {
  static auto& all = *new Loaded;
  return all;
}

}  // namespace

cudaError_t load(const void* kernel) {
  const std::lock_guard lock(loaded().mutex);
  if (loaded().kernels.contains(kernel)) return cudaSuccess;
  if (forbidden_by_capture()) return report(cudaErrorStreamCaptureUnsupported);
  loaded().kernels.insert(kernel);
  return cudaSuccess;
}

void unload_kernels() {
  const std::lock_guard lock(loaded().mutex);
  loaded().kernels.clear();
}

cudaError_t launch(cudaStream_t stream, std::function<void()> kernel) {
  if (resolve(stream)->device != current_device()) return report(cudaErrorInvalidResourceHandle);
  pay_for_launch();
  wait_for_product(stream);
  return enqueue(stream, std::move(kernel));
}

void wait_for_product(cudaStream_t stream) {
  stream = resolve(stream);
  const std::lock_guard lock(stream->mutex);
  ++stream->products;
}

std::int64_t num_products(cudaStream_t stream) {
  stream = resolve(stream);
  const std::lock_guard lock(stream->mutex);
  return stream->products;
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  stream = resolve(stream);
  if (event == nullptr || event->device != stream->device) return report(cudaErrorInvalidResourceHandle);
  if (is_broken()) return cudaErrorLaunchFailure;
  ++tally().records;
  wait_for_room_of(stream);
  const std::scoped_lock lock(stream->mutex, event->mutex);
  if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  event->products = stream->products;
  if (stream->capture == nullptr) {
    event->recorded = &stream->mark();
    return cudaSuccess;
  }
  const std::lock_guard captures_lock(captures_mutex());
  if (stream->capture->invalidated) return report(cudaErrorStreamCaptureInvalidated);
  event->clock = stream->capture->streams[stream];
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream = resolve(stream);
  if (is_broken()) return cudaErrorLaunchFailure;
  ++tally().waits;
  wait_for_room_of(stream);
  const std::scoped_lock lock(stream->mutex, event->mutex);
  if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
  stream->products = std::max(stream->products, event->products);
  if (stream->capture == nullptr && event->capture == nullptr) {
    if (event->recorded != nullptr) stream->push([flag = event->recorded] { flag->wait(); }, nullptr, true);
    return cudaSuccess;
  }
  const std::lock_guard captures_lock(captures_mutex());
  if (event->capture == nullptr) {
    if (event->recorded == nullptr) return cudaSuccess;
    return invalidate(*stream->capture, cudaErrorStreamCaptureIsolation);
  }
  if (event->capture->ended) return report(cudaErrorCapturedEvent);
  if (event->capture->invalidated) return report(cudaErrorStreamCaptureInvalidated);
  if (stream->capture == nullptr) stream->capture = event->capture;
  if (stream->capture != event->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureMerge);
  merge(stream->capture->streams[stream], event->clock);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = std::exchange(thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr) return report(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard lock(stream->mutex);
  if (stream->capture != nullptr) return report(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard captures_lock(captures_mutex());
  auto* capture = all_captures().emplace_back(new Capture{
      .id = all_captures().size() + 1, .origin = stream, .mode = mode, .thread = std::this_thread::get_id()});
  capture->graph = new CUgraph_st;
  capture->streams[stream];
  stream->capture = capture;
  ++num_captures;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  Capture* capture = nullptr;
  cudaError_t error = cudaSuccess;
  std::unique_ptr<CUgraph_st> recorded;
  std::map<cudaStream_t, Clock> streams;
  {
    const std::scoped_lock lock(stream->mutex, captures_mutex());
    capture = stream->capture;
    if (capture == nullptr) return report(cudaErrorIllegalState);
    if (capture->origin != stream) return report(cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
      return report(cudaErrorStreamCaptureWrongThread);
    }
    streams = std::move(capture->streams);
    for (auto& [forked, clock] : streams) {
      if (streams[stream][forked] < clock[forked]) error = cudaErrorStreamCaptureUnjoined;
    }
    if (capture->invalidated) error = cudaErrorStreamCaptureInvalidated;
    recorded.reset(std::exchange(capture->graph, nullptr));
    capture->ended = true;
    --num_captures;
  }
  for (const auto& [forked, clock] : streams) {
    const std::lock_guard lock(forked->mutex);
    if (forked->capture == capture) forked->capture = nullptr;
  }
  if (error != cudaSuccess) return report(error);
  *graph = recorded.release();
  count(&Counts::graphs, 1);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph) {
  stream = resolve(stream);
  const std::scoped_lock lock(stream->mutex, captures_mutex());
  *status = stream->capture == nullptr     ? cudaStreamCaptureStatusNone
            : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
  if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
  if (graph != nullptr) *graph = stream->capture == nullptr ? nullptr : stream->capture->graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->operations, graph->objects};
  count(&Counts::graphs, 1);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (is_broken()) return cudaErrorLaunchFailure;
  stream = resolve(stream);
  wait_for_room_of(stream);
  const std::lock_guard lock(stream->mutex);
  if (stream->destroyed) return report(cudaErrorInvalidResourceHandle);
  if (stream->capture != nullptr) return report(cudaErrorNotSupported);
  // Launches of one graph never overlap.
  if (exec->launched != nullptr) stream->push([flag = exec->launched] { flag->wait(); }, nullptr, true);
  for (const MakeWork& make : exec->operations) stream->push(make());
  exec->launched = &stream->mark();
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (exec->launched != nullptr) exec->launched->wait();
  delete exec;
  count(&Counts::graphs, -1);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned, unsigned) {
  *object = new CUuserObject_st(data, destroy);
  return cudaSuccess;
}

// The caller's only reference moves to the graph.
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
  const std::lock_guard lock(captures_mutex());
  graph->objects.emplace_back(object);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  count(&Counts::graphs, -1);
  return cudaSuccess;
}
