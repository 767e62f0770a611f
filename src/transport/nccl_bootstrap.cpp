// Meeting of the ranks of a communicator that the caller owns.
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/owned.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {
namespace {

using nccl::Result;
using Clock = std::chrono::steady_clock;

struct Slot {
  NcclUniqueId unique_id{};  // rank 0 alone fills it
  std::uint64_t token = 0;
};

void check(Result result) {
  if (result == Result::success || result == Result::in_progress) return;
  throw TransportError(std::string("NCCL could not meet over the given communicator: ") +
                       nccl::library().GetErrorString(result));
}

bool is_launched(nccl::Comm communicator) {
  Result state = Result::success;
  check(nccl::library().CommGetAsyncError(communicator, &state));
  check(state);
  return state == Result::success;
}

// What an all-gather that has failed may still read and write.
struct LeftBehind {
  std::unique_ptr<Slot> own;
  std::shared_ptr<DeviceBytes> memory;
};

// Keeps it for good, where leak checkers see it: the all-gather's communicator is not ours to end.
void leave_behind(LeftBehind left) {
  static std::mutex& mutex = *new std::mutex;
  static std::vector<LeftBehind>& all = *new std::vector<LeftBehind>;
  const std::lock_guard lock(mutex);
  all.push_back(std::move(left));
}

// Gathers the slots of all ranks, in memory of the current device, which it returns. `keep_waiting` throws when that
// takes too long.
std::shared_ptr<void> gather(nccl::Comm communicator, std::vector<Slot>& slots, int rank,
                             const std::function<void()>& keep_waiting) {
  const auto wait = [&](auto&& is_over) {
    for (; !is_over(); std::this_thread::sleep_for(std::chrono::microseconds(200))) keep_waiting();
  };
  auto own = std::make_unique<Slot>(slots[static_cast<std::size_t>(rank)]);
  const std::size_t num_bytes = slots.size() * sizeof(Slot);
  auto memory = std::make_shared<DeviceBytes>(num_bytes);
  auto* const on_device = reinterpret_cast<Slot*>(memory->data());
  Event done;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
  try {
    check_cuda(cudaMemcpyAsync(on_device + rank, own.get(), sizeof(Slot), cudaMemcpyHostToDevice, stream), "copy");
    check(nccl::library().AllGather(on_device + rank, on_device, sizeof(Slot), nccl::kInt8, communicator, stream));
    wait([&] { return is_launched(communicator); });
    done.record({stream});
    wait([&] { return done.is_over(); });
    check_cuda(cudaMemcpyAsync(slots.data(), on_device, num_bytes, cudaMemcpyDeviceToHost, stream), "copy");
    check_cuda(cudaStreamSynchronize(stream), "finish the work of a stream");
  } catch (...) {
    leave_behind({std::move(own), std::move(memory)});  // and the stream
    throw;
  }
  check_cuda(cudaStreamDestroy(stream), "destroy a stream");
  return memory;
}

}  // namespace

NcclUniqueId make_nccl_unique_id() {
  const nccl::Library& nccl = nccl::library();
  NcclUniqueId id;
  const nccl::Result result = nccl.GetUniqueId(&id);
  if (result != nccl::Result::success) {
    throw TransportError(std::string("NCCL could not name a group of ranks: ") + nccl.GetErrorString(result));
  }
  return id;
}

NcclBootstrap bootstrap_over_nccl(void* communicator, std::uint64_t token, std::chrono::milliseconds timeout,
                                  const std::function<void()>& look, bool makes_id) {
  check_argument(communicator != nullptr, "communicator: expected an ncclComm_t, got null");
  const Clock::time_point deadline = deadline_after(timeout);
  const nccl::Library& nccl = nccl::library();
  auto* const given = static_cast<nccl::Comm>(communicator);
  NcclBootstrap met;
  int size = 1;
  check(nccl.CommCount(given, &size));
  check(nccl.CommUserRank(given, &met.rank));
  check(nccl.CommCuDevice(given, &met.device));
  const RelaxedCaptureGuard relaxed;
  const CudaDeviceGuard device(met.device);
  std::vector<Slot> slots(static_cast<std::size_t>(size));
  Slot& own = slots[static_cast<std::size_t>(met.rank)];
  own.token = token;
  if (met.rank == 0 && makes_id) check(nccl.GetUniqueId(&own.unique_id));
  Clock::time_point next_look = Clock::now() + std::chrono::milliseconds(100);
  met.memory = gather(given, slots, met.rank, [&] {
    const Clock::time_point now = Clock::now();
    if (now >= next_look) {
      next_look = now + std::chrono::milliseconds(100);
      look();
    }
    if (now < deadline) return;
    throw TimeoutError("rank " + std::to_string(met.rank) + " of " + std::to_string(size) +
                       " did not meet the others over the given NCCL communicator in time");
  });
  met.unique_id = slots.front().unique_id;
  for (const Slot& slot : slots) met.tokens.push_back(slot.token);
  return met;
}

}  // namespace zcomm
