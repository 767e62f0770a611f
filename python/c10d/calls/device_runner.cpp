#include <ATen/core/ivalue_inl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "c10d/base/python_hooks.hpp"
#include "c10d/base/tensors.hpp"
#include "runners.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm::c10d_binding {
namespace {

StreamView stream_view(c10::Stream stream) { return {stream.native_handle()}; }

// Tells whether the device is past an event; another thread may capture a graph.
bool is_over(const c10::Event& event) {
  const RelaxedCaptureGuard relaxed;
  return event.query();
}

}  // namespace

// Tensors of an asynchronous job, which must outlive it even if the caller drops the work without waiting.
struct HeldTensors {
  explicit HeldTensors(at::DeviceType type) : end(type) {}

  c10::Event end;
  std::mutex mutex;
  std::vector<at::Tensor> tensors;

  void clear() {
    std::vector<at::Tensor> freed;  // freed after the lock is released
    const std::lock_guard lock(mutex);
    freed.swap(tensors);
  }
  bool is_clear() {
    const std::lock_guard lock(mutex);
    return tensors.empty();
  }
  bool is_over() const { return c10d_binding::is_over(end); }
};

namespace {

// Work of a job. Made when it is queued, with the job's stream current. A synchronous job holds no tensors: it runs on
// the caller's stream and needs no wait.
class DeviceWork final : public ::c10d::Work {
 public:
  DeviceWork(const Job& job, c10::Stream stream, std::shared_ptr<HeldTensors> held,
             std::shared_ptr<const GroupErrors> errors, bool blocking_wait)
      : Work(-1, job.type, job.title(), job.inputs),
        outputs_(job.outputs),
        stream_(stream),
        held_(std::move(held)),
        errors_(std::move(errors)),
        blocking_wait_(blocking_wait),
        sequence_number_(job.sequence_number) {
    if (held_) getFuture();  // while nothing else follows the job on its stream
  }

  // Returns true once the device has done the job; for a synchronous job, once it is queued.
  bool isCompleted() override { return !held_ || exception() || held_->is_over(); }
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override { return errors_->failure(); }
  // Makes the current stream wait. Throws if the group has failed meanwhile.
  void synchronize() override {
    if (held_) {
      held_->end.block(current_stream(stream_.device()));
      held_->clear();
    }
    errors_->check();
  }
  // Waits as synchronize(); with a timeout, also blocks the host until the device is done. Throws if the group has
  // failed meanwhile, and on a timeout.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (held_ && (timeout != kNoTimeout || blocking_wait_)) block_host(timeout);
    errors_->check();
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<at::Device>{stream_.device()});
      const c10::StreamGuard on_stream(stream_);  // orders the future's callbacks and waiters
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }
  std::uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  void block_host(std::chrono::milliseconds timeout) {
    const auto start = std::chrono::steady_clock::now();
    while (!held_->is_over() && !exception()) {
      if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
        C10_THROW_ERROR(DistBackendError, "zcomm: the collective was not done within the " +
                                              std::to_string(timeout.count()) + " ms that wait() was given");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  std::vector<at::Tensor> outputs_;
  c10::Stream stream_;
  std::shared_ptr<HeldTensors> held_;
  std::shared_ptr<const GroupErrors> errors_;
  bool blocking_wait_;
  std::uint64_t sequence_number_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of a synchronous job: made on demand
};

}  // namespace

void DeviceRunner::connect(at::Device device) {
  errors_->check();  // of a job before
  auto fresh = connect_(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  device_ = device;
  stream_ = guard.getStreamFromGlobalPool(device, high_priority_);
  start_event_.emplace(device.type());
  end_event_.emplace(device.type());
  const std::lock_guard lock(mutex_);
  communicator_ = std::move(fresh);
  if (errors_->is_aborted()) communicator_->abort(kAborted);
}

// Releases the tensors of finished jobs that nobody has waited for. Keeps the last job, whose end is that of all.
void DeviceRunner::release_finished() {
  for (const auto& held : held_) {
    if (held->is_clear()) continue;
    if (!held->is_over()) break;
    held->clear();
  }
  while (held_.size() > 1 && held_.front()->is_clear()) held_.pop_front();
}

WorkPtr DeviceRunner::launch(JobPtr job) {
  const std::lock_guard lock(launch_mutex_);
  const at::Device device = job->outputs[0].device();
  TORCH_CHECK(!stopped_, kShutDown);
  TORCH_CHECK_VALUE(!device_ || *device_ == device, "zcomm: expected a tensor on this group's device, ",
                    device_.value_or(device), ", got one on ", device, ": a rank has one device");
  const c10::DeviceGuard on_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream current = guard.getStream(device);
  bool capturing = false;
  try {
    capturing = is_capturing(stream_view(current));
    if (!communicator_ && !capturing) connect(device);
  } catch (const std::exception& caught) {
    std::rethrow_exception(errors_->record(caught));
  }
  TORCH_CHECK(
      communicator_,
      "zcomm: a group's first compressed call on a GPU connects its ranks, which a graph cannot capture: make one "
      "before the capture");
  communicator_->check_stream(stream_view(current));  // first, as what fails later ends the group
  if (!capturing) release_finished();

  const auto connected = [this]() -> Communicator& { return *communicator_; };
  if (!job->settings.async) {
    job->run(connected, stream_view(current), *errors_);
    if (!capturing) end_event_->record(current);
    return c10::make_intrusive<DeviceWork>(*job, current, nullptr, errors_, blocking_wait_);
  }
  start_event_->record(current);
  start_event_->block(*stream_);
  const c10::StreamGuard on_stream(*stream_);  // scratch belongs to the stream, too
  auto held = std::make_shared<HeldTensors>(device.type());
  held->tensors = job->inputs;
  held->tensors.insert(held->tensors.end(), job->outputs.begin(), job->outputs.end());
  std::exception_ptr error;
  try {
    job->run(connected, stream_view(*stream_), *errors_);
  } catch (const std::exception&) {
    error = std::current_exception();  // queued work still uses the tensors
  }
  held->end.record(*stream_);
  if (!capturing) held_.push_back(held);  // events of a graph cannot be queried, and the graph owns its memory
  if (error) std::rethrow_exception(error);
  return c10::make_intrusive<DeviceWork>(*job, *stream_, std::move(held), errors_, blocking_wait_);
}

bool DeviceRunner::drain(std::chrono::milliseconds limit) {
  const WithoutGil no_gil;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const std::unique_lock lock(launch_mutex_, limit);
  if (!lock) return false;
  const auto is_done = [&] {
    return (held_.empty() || held_.back()->is_over()) && (!end_event_ || is_over(*end_event_));
  };
  while (!is_done()) {
    if (errors_->failure() || std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void DeviceRunner::join() {
  const std::lock_guard lock(launch_mutex_);
  if (held_.empty()) return;
  const c10::Stream current = current_stream(*device_);
  if (!is_capturing(stream_view(current))) held_.back()->end.block(current);
}

void DeviceRunner::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (communicator_) communicator_->abort(reason);
}

void DeviceRunner::stop() {
  const WithoutGil no_gil;
  const std::lock_guard launch_lock(launch_mutex_);
  std::unique_ptr<Communicator> last;
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  last = std::move(communicator_);
}

DeviceRunner::~DeviceRunner() { stop(); }

}  // namespace zcomm::c10d_binding
