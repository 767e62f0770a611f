// The functions of NCCL that zcomm uses, for ranks that are threads or processes of one machine without a GPU. They
// keep NCCL's rules: a group becomes one operation on the stream; a communicator that does not block says
// ncclInProgress and goes on when it is polled; what is forbidden is noted, for tests to see.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "communicator.hpp"
#include "nccl_host.hpp"

#define ZCOMM_DECLARE(name, result, parameters) extern "C" result nccl##name parameters;
using nccl_host::Result;
using zcomm::nccl::Comm;
using zcomm::nccl::Config;
using zcomm::nccl::DataType;
using zcomm::nccl::Stream;
using zcomm::nccl::UniqueId;
ZCOMM_NCCL_FUNCTIONS(ZCOMM_DECLARE)
#undef ZCOMM_DECLARE

namespace nccl_host {
namespace {

constexpr int kVersion = 22809;
constexpr int kSendRecv = 0;
constexpr int kAllGather = 1;

std::atomic<int> num_launches{0};

// What this thread has called since ncclGroupStart.
struct Pending {
  ncclComm* communicator;
  cudaStream_t stream;
  std::vector<Message> messages;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> group;
thread_local Result group_error = Result::success;

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
  return communicator.is_connecting || communicator.launch ||
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

void put_on_stream(ncclComm& communicator) {
  std::exchange(communicator.launch, nullptr)();
  ++num_launches;
}

Result launch(Pending pending) {
  ncclComm& communicator = *pending.communicator;
  if (!is_ready(communicator, "a transfer")) return Result::invalid_argument;
  if (cuda_host::resolve(pending.stream)->device != communicator.device) {
    note_misuse("a transfer on a stream of another device");
  }
  const auto lease = std::make_shared<Lease>(communicator);
  communicator.launch = [&communicator, stream = pending.stream, lease, messages = std::move(pending.messages)] {
    const auto work = [&communicator, lease, messages] { exchange(communicator, messages); };
    if (cuda_host::enqueue(stream, work) != cudaSuccess) communicator.async_error = Result::unhandled_cuda_error;
  };
  communicator.polls_left = settings().launch_polls;
  if (!communicator.is_blocking) return Result::in_progress;
  put_on_stream(communicator);
  return communicator.async_error;
}

Result end_group() {
  Result result = std::exchange(group_error, Result::success);
  for (Pending& pending : std::exchange(group, {})) {
    const Result launched =
        result == Result::success || result == Result::in_progress ? launch(std::move(pending)) : result;
    if (launched != Result::success) result = launched;
  }
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

std::byte* writable(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

}  // namespace
}  // namespace nccl_host

using namespace nccl_host;

int nccl_host_num_launches() { return num_launches; }

Result ncclGetVersion(int* version) {
  *version = kVersion;
  return Result::success;
}

const char* ncclGetErrorString(Result result) {
  constexpr const char* kNames[] = {"no error",       "unhandled cuda error", "unhandled system error",
                                    "internal error", "invalid argument",     "invalid usage",
                                    "remote error",   "in progress"};
  return kNames[static_cast<unsigned>(result)];
}

const char* ncclGetLastError(Comm) { return last_error(); }

Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> counter{0};
  const std::string name = "/zcomm-nccl-" + std::to_string(getpid()) + "-" + std::to_string(counter++) + "-" +
                           std::to_string(std::random_device{}());
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->internal, name.c_str(), name.size());
  return Result::success;
}

Result ncclCommInitRankConfig(Comm* made, int size, UniqueId id, int rank, Config* config) {
  if (rank < 0 || rank >= size || size > kMaxRanks || config->magic != Config{}.magic) return Result::invalid_argument;
  ncclComm& communicator = make_communicator(id.internal, rank, size, config->blocking != 0);
  *made = &communicator;
  return connect_in_background(communicator, [&communicator] { meet(communicator); });
}

// Of all ranks, in the order that they have; the other uses of the real one are not there.
Result ncclCommSplit(Comm parent, int color, int key, Comm* made, Config* config) {
  const Inside inside(*parent, "ncclCommSplit");
  if (!is_ready(*parent, "ncclCommSplit") || key != parent->rank) return Result::invalid_argument;
  const std::string name = parent->name + "-" + std::to_string(parent->num_splits++) + "-" + std::to_string(color);
  ncclComm& child = make_communicator(name, parent->rank, parent->size, config->blocking != 0);
  child.device = parent->device;
  *made = nullptr;
  parent->splitting = &child;
  return connect_in_background(*parent, [&child, parent, made] {
    meet(child);
    parent->async_error = child.async_error.load();
    parent->splitting = nullptr;
    *made = &child;
  });
}

Result ncclCommGetAsyncError(Comm communicator, Result* state) {
  const Inside inside(*communicator, "ncclCommGetAsyncError");
  if (!communicator->is_connecting && communicator->background.joinable()) communicator->background.join();
  if (communicator->launch && --communicator->polls_left <= 0) put_on_stream(*communicator);
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
  if (ncclComm* child = communicator->splitting) child->is_aborted = true;
  if (communicator->background.joinable()) communicator->background.join();
  if (communicator->segment != nullptr) communicator->segment->ring(communicator->rank);
  close(*communicator);
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

Result ncclSend(const void* data, std::size_t count, DataType, int peer, Comm communicator, Stream stream) {
  return add(communicator, stream, {true, kSendRecv, peer, writable(data), count}, "ncclSend");
}

Result ncclRecv(void* data, std::size_t count, DataType, int peer, Comm communicator, Stream stream) {
  return add(communicator, stream, {false, kSendRecv, peer, writable(data), count}, "ncclRecv");
}

Result ncclAllGather(const void* own, void* slots, std::size_t count, DataType, Comm communicator, Stream stream) {
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
