// Meeting of the ranks of a communicator that the caller owns.
#include <cstring>
#include <memory>
#include <thread>

#include "cuda/owned.hpp"
#include "transport/nccl_symbols.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm {
namespace {

using nccl::Result;
using Clock = std::chrono::steady_clock;

struct Slot {
  nccl::UniqueId unique_id{};  // rank 0 alone fills it
  std::uint64_t token = 0;
};

class Meeting {
 public:
  Meeting(nccl::Comm communicator, std::chrono::milliseconds timeout, const std::function<void()>& look)
      : communicator_(communicator), deadline_(deadline_after(timeout)), look_(look) {
    check(symbols_.CommCount(communicator, &size));
    check(symbols_.CommUserRank(communicator, &rank));
    check(symbols_.CommCuDevice(communicator, &device));
  }

  // Returns the slots of all ranks.
  std::vector<Slot> gather(std::uint64_t token) {
    const RelaxedCaptureGuard relaxed;
    const CudaDeviceGuard guard(device);
    std::vector<Slot> slots(static_cast<std::size_t>(size));
    Slot& own = slots[static_cast<std::size_t>(rank)];
    own.token = token;
    if (rank == 0) check(symbols_.GetUniqueId(&own.unique_id));
    const std::size_t num_bytes = slots.size() * sizeof(Slot);
    auto memory = std::make_unique<DeviceBytes>(num_bytes);
    auto* const device_slots = reinterpret_cast<Slot*>(memory->data());
    Event done;
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
    try {
      check_cuda(cudaMemcpyAsync(device_slots + rank, &own, sizeof(Slot), cudaMemcpyHostToDevice, stream), "copy");
      check(symbols_.AllGather(device_slots + rank, device_slots, sizeof(Slot), nccl::DataType::int8, communicator_,
                               stream));
      wait([this] { return is_launched(); });
      done.record({stream});
      wait([&done] { return done.is_over(); });
      check_cuda(cudaMemcpyAsync(slots.data(), device_slots, num_bytes, cudaMemcpyDeviceToHost, stream), "copy");
      check_cuda(cudaStreamSynchronize(stream), "finish the work of a stream");
    } catch (...) {
      // Leaves memory and stream behind: the all-gather may still be under way, and its communicator's owner ends it.
      static_cast<void>(memory.release());  // NOLINT(bugprone-unused-return-value): left behind
      throw;
    }
    check_cuda(cudaStreamDestroy(stream), "destroy a stream");
    return slots;
  }

  int rank = 0;
  int size = 1;
  int device = 0;

 private:
  void check(Result result) const {
    if (result == Result::success || result == Result::in_progress) return;
    throw TransportError(std::string("NCCL could not meet over the given communicator: ") +
                         symbols_.GetErrorString(result));
  }

  bool is_launched() const {
    Result state = Result::success;
    check(symbols_.CommGetAsyncError(communicator_, &state));
    check(state);
    return state == Result::success;
  }

  template <class IsOver>
  void wait(IsOver&& is_over) const {
    Clock::time_point next_look = Clock::now() + std::chrono::milliseconds(100);
    while (!is_over()) {
      const Clock::time_point now = Clock::now();
      if (now >= next_look) {
        next_look = now + std::chrono::milliseconds(100);
        look_();
      }
      if (now >= deadline_) {
        throw TimeoutError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                           " did not meet the others over the given NCCL communicator in time");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  const nccl::Symbols& symbols_ = nccl::library().symbols;
  const nccl::Comm communicator_;
  const Clock::time_point deadline_;
  const std::function<void()>& look_;
};

}  // namespace

NcclMeeting meet_over_nccl(void* communicator, std::uint64_t token, std::chrono::milliseconds timeout,
                           const std::function<void()>& look) {
  check_argument(communicator != nullptr, [] { return std::string("communicator: expected an ncclComm_t, got null"); });
  Meeting meeting(static_cast<nccl::Comm>(communicator), timeout, look);
  const std::vector<Slot> slots = meeting.gather(token);
  NcclMeeting met{meeting.rank, meeting.device, {}, {}};
  std::memcpy(met.unique_id.data(), &slots.front().unique_id, met.unique_id.size());
  for (const Slot& slot : slots) met.tokens.push_back(slot.token);
  return met;
}

}  // namespace zcomm
