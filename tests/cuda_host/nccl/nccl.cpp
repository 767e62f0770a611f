// The functions of NCCL that zcomm uses, for ranks that are threads or processes of one machine without a GPU. They
// keep NCCL's rules: a group becomes one operation on the stream; a communicator that does not block says
// ncclInProgress and goes on when it is polled; what is forbidden is noted, for tests to see.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "communicator.hpp"
#include "front/request.hpp"
#include "nccl_host.hpp"

namespace nccl_host {
namespace {

constexpr int kHasSafeGroups = 22602;  // one thread may have groups on several communicators

std::atomic<int> num_launches{0};
std::atomic<int> num_threads{0};

// What this thread has called since ncclGroupStart.
struct Pending {
  ncclComm* communicator;
  cudaStream_t stream;
  std::vector<Message> messages;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> group;
thread_local Result group_error = Result::success;
thread_local std::vector<ncclComm*> aborted;     // since ncclGroupStart
thread_local ncclComm* last_launched = nullptr;  // by this thread

// A call on a communicator, which no other thread may be inside.
class Inside {
 public:
  Inside(ncclComm& communicator, const char* function) : communicator_(communicator) {
    if (communicator.inside.fetch_add(1) > 0) note_misuse(std::string(function) + " beside another call");
    if (communicator.is_closed) note_misuse(std::string(function) + " on a communicator that is gone");
  }
  ~Inside() { communicator_.inside.fetch_sub(1); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  ncclComm& communicator_;
};

bool is_in_progress(const ncclComm& communicator) {
  return communicator.is_connecting || communicator.is_launching ||
         (communicator.is_finalizing && !communicator.is_finalized);
}

bool is_ready(const ncclComm& communicator, const char* function) {
  const bool ready = !communicator.is_closed && !communicator.is_finalizing && !is_in_progress(communicator);
  if (!ready) note_misuse(std::string(function) + " before the last call was done, or after the last one");
  return ready && communicator.async_error == Result::success;
}

// Lets a call go on in the background, or finishes it.
template <class Work>
Result connect_in_background(ncclComm& communicator, Work&& work) {
  join(communicator);
  communicator.is_connecting = true;
  communicator.background = std::async(std::launch::async, [&communicator, work] {
                              work();
                              communicator.is_connecting = false;
                            }).share();
  if (!communicator.is_blocking) return Result::in_progress;
  join(communicator);
  return communicator.async_error;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  return status != cudaStreamCaptureStatusNone;
}

// Connects where that is needed, and waits as long as a launch takes. False if the communicator was aborted.
bool prepare(ncclComm& communicator, const Pending& pending) {
  if (connect_peers(communicator, pending.messages) && is_captured(pending.stream)) {
    note_misuse("ranks connect while a graph is captured");
  }
  if (const int cost = settings().group_cost_us) std::this_thread::sleep_for(std::chrono::microseconds(cost));
  while (!communicator.is_blocking && *communicator.polls_left > 0 && !communicator.is_aborted) {
    cuda_host::nap(std::chrono::microseconds(10));
  }
  return !communicator.is_aborted;
}

void put_on_stream(ncclComm& communicator, Pending pending) {
  auto lease = std::make_shared<Lease>(communicator);
  const auto submit = [&communicator] { return communicator.num_submitted.fetch_add(1, std::memory_order_relaxed); };
  cudaError_t result = cudaSuccess;
  cuda_host::wait_for_product(pending.stream);
  if (is_captured(pending.stream)) {
    // The lease is the graph's.
    result = cuda_host::enqueue_made(
        pending.stream, [&communicator, submit, lease = std::move(lease), messages = std::move(pending.messages)] {
          return [&communicator, &messages, number = submit()] { exchange(communicator, number, messages); };
        });
  } else {
    result = cuda_host::enqueue(pending.stream,
                                [&communicator, number = submit(), lease = std::move(lease),
                                 messages = std::move(pending.messages)] { exchange(communicator, number, messages); });
  }
  if (result != cudaSuccess) communicator.async_error = Result::unhandled_cuda_error;
  ++num_launches;
}

// After all flags are set: returns when nothing that these put on streams, or that a graph has of them, is there. NCCL
// frees memory then, which waits for all that runs on the device.
void reclaim(const std::vector<ncclComm*>& communicators) {
  for (const ncclComm* communicator : communicators) join(*communicator);
  for (ncclComm* communicator : communicators) {
    while (communicator->num_leases > 0 || has_running(communicator->device)) {
      cuda_host::nap(std::chrono::microseconds(200));
    }
    close(*communicator);
  }
}

Result check_launch(const Pending& pending) {
  ncclComm& communicator = *pending.communicator;
  if (!is_ready(communicator, "a transfer")) return Result::invalid_argument;
  if (cuda_host::resolve(pending.stream)->device != communicator.device) {
    note_misuse("a transfer on a stream of another device");
  }
  if (version() < kHasSafeGroups && last_launched != nullptr && last_launched != &communicator) {
    note_misuse("a thread's groups on two communicators, which crash NCCL before 2.26.2");
  }
  last_launched = &communicator;
  join(communicator);
  return Result::success;
}

Result launch(const Pending& pending) {
  ncclComm& communicator = *pending.communicator;
  if (prepare(communicator, pending)) put_on_stream(communicator, pending);
  return communicator.async_error;
}

// One thread puts a group on its streams, one communicator after the other.
Result launch_in_background(const std::vector<Pending>& launched) {
  const auto polls_left = std::make_shared<std::atomic<int>>(settings().launch_polls.load());
  for (const Pending& pending : launched) {
    pending.communicator->polls_left = polls_left;
    pending.communicator->is_launching = true;
  }
  ++num_threads;
  const auto background = std::async(std::launch::async, [launched] {
                            cudaSetDevice(launched.front().communicator->device);
                            for (const Pending& pending : launched) launch(pending);
                            for (const Pending& pending : launched) pending.communicator->is_launching = false;
                          }).share();
  for (const Pending& pending : launched) pending.communicator->background = background;
  return Result::in_progress;
}

Result end_group() {
  Result result = std::exchange(group_error, Result::success);
  std::vector<Pending> launched = std::exchange(group, {});
  // NCCL goes by hashes of the communicators, not by who came first.
  std::ranges::sort(launched, {},
                    [](const Pending& each) { return std::hash<std::string>{}(each.communicator->name); });
  for (const Pending& pending : launched) {
    if (result == Result::success) result = check_launch(pending);
  }
  const auto blocks = [](const Pending& pending) { return pending.communicator->is_blocking; };
  const bool is_blocking = std::ranges::any_of(launched, blocks);
  if (is_blocking && !std::ranges::all_of(launched, blocks)) result = Result::invalid_argument;
  if (result == Result::success && !is_blocking && !launched.empty()) result = launch_in_background(launched);
  for (const Pending& pending : launched) {
    if (result == Result::success && is_blocking) result = launch(pending);
  }
  reclaim(std::exchange(aborted, {}));
  return result;
}

// NCCL_COMM_BLOCKING wins over what the caller says.
bool is_blocking(const Config& config) {
  const char* text = std::getenv("NCCL_COMM_BLOCKING");
  return text == nullptr ? config.blocking != 0 : std::atoi(text) != 0;
}

std::byte* writable(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

}  // namespace

Result add(ncclComm* communicator, cudaStream_t stream, const Message& message, const char* function) {
  const Inside inside(*communicator, function);
  Result result = Result::success;
  if (message.peer < 0 || message.peer >= communicator->size || (message.data == nullptr && message.num_bytes > 0)) {
    set_last_error(std::string(function) + ": wrong argument");
    result = Result::invalid_argument;
  } else {
    const auto found = std::find_if(group.begin(), group.end(), [&](const Pending& pending) {
      return pending.communicator == communicator && pending.stream == stream;
    });
    if (found != group.end()) {
      found->messages.push_back(message);
    } else {
      group.push_back({communicator, stream, {message}});
    }
  }
  if (result != Result::success) group_error = result;
  if (group_depth > 0) return result;
  return end_group();
}

}  // namespace nccl_host

using namespace nccl_host;

int nccl_host_num_launches() { return num_launches; }
int nccl_host_num_threads() { return num_threads; }

Result ncclGetVersion(int* found) {
  *found = version();
  return Result::success;
}

const char* ncclGetErrorString(Result result) {
  constexpr const char* kNames[] = {"no error",       "unhandled cuda error", "unhandled system error",
                                    "internal error", "invalid argument",     "invalid usage",
                                    "remote error",   "in progress"};
  return kNames[static_cast<unsigned>(result)];
}

const char* ncclGetLastError(Comm) { return last_error(); }

Result ncclGetUniqueId(NcclUniqueId* id) {
  static std::atomic<int> counter{0};
  const std::string name = "/zcomm-nccl-" + std::to_string(getpid()) + "-" + std::to_string(counter++) + "-" +
                           std::to_string(std::random_device{}());
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->data(), name.c_str(), name.size());
  return Result::success;
}

Result ncclCommInitRankConfig(Comm* made, int size, NcclUniqueId id, int rank, Config* config) {
  // NCCL reads plugins and finds networks on the caller's thread, for as long as that takes.
  if (const char* text = std::getenv("NCCL_HOST_INIT_SECONDS"))
    std::this_thread::sleep_for(std::chrono::seconds(std::atoi(text)));
  Config usual = zcomm::nccl::config_of(version());
  usual.blocking = 1;
  if (config == nullptr) config = &usual;
  if (!accept(*config, false) || rank < 0 || rank >= size || size > kMaxRanks) return Result::invalid_argument;
  ncclComm& communicator =
      make_communicator(reinterpret_cast<const char*>(id.data()), rank, size, is_blocking(*config), false);
  *made = &communicator;
  return connect_in_background(communicator, [&communicator] { meet(communicator, communicator.is_aborted); });
}

Result ncclCommInitRank(Comm* made, int size, NcclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

Result ncclCommSplit(Comm parent, int color, int key, Comm* made, Config* config) {
  const Inside inside(*parent, "ncclCommSplit");
  if (!is_ready(*parent, "ncclCommSplit")) return Result::invalid_argument;
  const bool is_supported = key == parent->rank && color >= 0 && !parent->is_split;
  if (!is_supported || config == nullptr || !accept(*config, true)) return Result::invalid_argument;
  parent->is_split = true;
  *made = nullptr;
  const bool blocks = is_blocking(*config);
  return connect_in_background(*parent, [=] { split(*parent, color, *made, blocks); });
}

Result ncclCommCount(Comm communicator, int* size) {
  *size = communicator->size;
  return Result::success;
}

Result ncclCommUserRank(Comm communicator, int* rank) {
  *rank = communicator->rank;
  return Result::success;
}

Result ncclCommCuDevice(Comm communicator, int* device) {
  *device = communicator->device;
  return Result::success;
}

Result ncclCommGetAsyncError(Comm communicator, Result* state) {
  if (settings().keeps_error_queries) ++settings().num_kept_error_queries;
  while (settings().keeps_error_queries) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Inside inside(*communicator, "ncclCommGetAsyncError");
  --*communicator->polls_left;
  const bool is_busy = communicator->is_connecting || communicator->is_launching;
  if (!is_busy) join(*communicator);
  if (communicator->is_finalizing && communicator->num_leases == 0) communicator->is_finalized = true;
  *state = communicator->async_error;
  if (*state == Result::success && is_in_progress(*communicator)) *state = Result::in_progress;
  return Result::success;
}

Result ncclCommFinalize(Comm communicator) {
  const Inside inside(*communicator, "ncclCommFinalize");
  if (!is_ready(*communicator, "ncclCommFinalize")) return Result::invalid_argument;
  communicator->is_finalizing = true;
  if (!communicator->is_blocking) return Result::in_progress;
  while (communicator->num_leases > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  communicator->is_finalized = true;
  return Result::success;
}

Result ncclCommDestroy(Comm communicator) {
  const Inside inside(*communicator, "ncclCommDestroy");
  if (communicator->num_leases > 0) note_misuse("ncclCommDestroy with work under way");
  close(*communicator);
  return Result::success;
}

Result ncclCommAbort(Comm communicator) {
  const Inside inside(*communicator, "ncclCommAbort");
  communicator->is_aborted.store(true, std::memory_order_relaxed);
  if (!communicator->is_connecting && communicator->segment != nullptr) communicator->segment->ring(communicator->rank);
  join(*communicator);  // a group of several communicators is launched by one thread
  if (group_depth > 0) {
    aborted.push_back(communicator);
  } else {
    reclaim({communicator});
  }
  return Result::success;
}

Result ncclGroupStart() {
  ++group_depth;
  return Result::success;
}

Result ncclGroupEnd() {
  if (group_depth == 0) {
    note_misuse("ncclGroupEnd without ncclGroupStart");
    return Result::invalid_usage;
  }
  return --group_depth == 0 ? end_group() : Result::success;
}

Result ncclSend(const void* data, std::size_t count, unsigned type, int peer, Comm communicator, Stream stream) {
  const std::size_t num_bytes = count * zcomm::front::bytes_of_type(type);
  return add(communicator, stream, {true, kSendRecv, peer, writable(data), num_bytes}, "ncclSend");
}

Result ncclRecv(void* data, std::size_t count, unsigned type, int peer, Comm communicator, Stream stream) {
  const std::size_t num_bytes = count * zcomm::front::bytes_of_type(type);
  return add(communicator, stream, {false, kSendRecv, peer, writable(data), num_bytes}, "ncclRecv");
}
