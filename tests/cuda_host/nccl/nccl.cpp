// The functions of NCCL that zcomm uses, for ranks that are threads or processes of one machine without a GPU. They
// keep NCCL's rules: a group becomes one operation on the stream; a communicator that does not block says
// ncclInProgress and goes on when it is polled; what is forbidden is noted, for tests to see.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "communicator.hpp"
#include "nccl_host.hpp"

#define ZCOMM_DECLARE(name, result, parameters) extern "C" result nccl##name parameters;
using nccl_host::Result;
using zcomm::NcclUniqueId;
using zcomm::nccl::Comm;
using zcomm::nccl::Config;
using zcomm::nccl::Stream;
ZCOMM_NCCL_FUNCTIONS(ZCOMM_DECLARE)
#undef ZCOMM_DECLARE

namespace nccl_host {
namespace {

constexpr int kHasSafeGroups = 22602;  // one thread may have groups on several communicators
constexpr int kSendRecv = 0;
constexpr int kAllGather = 1;

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

// Waits until all ranks have the segment. Runs in the background.
void meet(ncclComm& communicator) {
  Segment& segment = attach(communicator.name);
  communicator.segment = &segment;
  const auto size = static_cast<std::uint32_t>(communicator.size);
  std::uint32_t expected = 0;
  if (!segment.num_ranks.compare_exchange_strong(expected, size) && expected != size) {
    communicator.async_error = Result::invalid_argument;
    return;
  }
  ++segment.num_arrived;
  while (segment.num_arrived < size && !communicator.is_aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  unlink(communicator.name);
}

// Lets a call go on in the background, or finishes it.
template <class Work>
Result connect_in_background(ncclComm& communicator, Work&& work) {
  if (communicator.background.joinable()) communicator.background.join();
  communicator.is_connecting = true;
  communicator.background = std::thread([&communicator, work] {
    work();
    communicator.is_connecting = false;
  });
  if (!communicator.is_blocking) return Result::in_progress;
  communicator.background.join();
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
  while (!communicator.is_blocking && communicator.polls_left > 0 && !communicator.is_aborted) {
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

// After all flags are set: returns when nothing that these put on streams, or that a graph has of them, is there.
void reclaim(const std::vector<ncclComm*>& communicators) {
  for (ncclComm* communicator : communicators) {
    if (communicator->background.joinable()) communicator->background.join();
  }
  for (ncclComm* communicator : communicators) {
    while (communicator->num_leases > 0) cuda_host::nap(std::chrono::microseconds(200));
    close(*communicator);
  }
}

Result launch(Pending pending) {
  ncclComm& communicator = *pending.communicator;
  if (!is_ready(communicator, "a transfer")) return Result::invalid_argument;
  if (cuda_host::resolve(pending.stream)->device != communicator.device) {
    note_misuse("a transfer on a stream of another device");
  }
  if (version() < kHasSafeGroups && last_launched != nullptr && last_launched != &communicator) {
    note_misuse("a thread's groups on two communicators, which crash NCCL before 2.26.2");
  }
  last_launched = &communicator;
  if (communicator.background.joinable()) communicator.background.join();
  communicator.polls_left = settings().launch_polls.load();
  if (communicator.is_blocking) {
    if (prepare(communicator, pending)) put_on_stream(communicator, std::move(pending));
    return communicator.async_error;
  }
  communicator.is_launching = true;
  ++num_threads;
  communicator.background = std::thread([&communicator, pending = std::move(pending)] {
    cudaSetDevice(communicator.device);
    if (prepare(communicator, pending)) put_on_stream(communicator, pending);
    communicator.is_launching = false;
  });
  return Result::in_progress;
}

Result end_group() {
  Result result = std::exchange(group_error, Result::success);
  for (Pending& pending : std::exchange(group, {})) {
    const Result launched =
        result == Result::success || result == Result::in_progress ? launch(std::move(pending)) : result;
    if (launched != Result::success) result = launched;
  }
  reclaim(std::exchange(aborted, {}));
  return result;
}

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

// NCCL_COMM_BLOCKING wins over what the caller says.
bool is_blocking(const Config& config) {
  const char* text = std::getenv("NCCL_COMM_BLOCKING");
  return text == nullptr ? config.blocking != 0 : std::atoi(text) != 0;
}

std::byte* writable(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

}  // namespace
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
  if (!accept(*config) || rank < 0 || rank >= size || size > kMaxRanks) return Result::invalid_argument;
  ncclComm& communicator =
      make_communicator(reinterpret_cast<const char*>(id.data()), rank, size, is_blocking(*config));
  *made = &communicator;
  return connect_in_background(communicator, [&communicator] { meet(communicator); });
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
  --communicator->polls_left;
  const bool is_busy = communicator->is_connecting || communicator->is_launching;
  if (!is_busy && communicator->background.joinable()) communicator->background.join();
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

Result ncclSend(const void* data, std::size_t count, unsigned, int peer, Comm communicator, Stream stream) {
  return add(communicator, stream, {true, kSendRecv, peer, writable(data), count}, "ncclSend");
}

Result ncclRecv(void* data, std::size_t count, unsigned, int peer, Comm communicator, Stream stream) {
  return add(communicator, stream, {false, kSendRecv, peer, writable(data), count}, "ncclRecv");
}

Result ncclAllGather(const void* own, void* slots, std::size_t count, unsigned, Comm communicator, Stream stream) {
  std::byte* const own_slot = writable(slots) + static_cast<std::size_t>(communicator->rank) * count;
  if (own != own_slot) return Result::invalid_argument;  // zcomm gathers in place
  Result result = ncclGroupStart();
  for (int peer = 0; peer < communicator->size; ++peer) {
    if (peer == communicator->rank) continue;
    std::byte* const slot = writable(slots) + static_cast<std::size_t>(peer) * count;
    add(communicator, stream, {true, kAllGather, peer, own_slot, count}, "ncclAllGather");
    add(communicator, stream, {false, kAllGather, peer, slot, count}, "ncclAllGather");
  }
  const Result ended = ncclGroupEnd();
  return result == Result::success ? ended : result;
}
