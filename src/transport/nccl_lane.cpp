#include "transport/nccl_lane.hpp"

#include <cstring>
#include <string>
#include <thread>

namespace zcomm {
namespace {

using nccl::Result;
using Clock = std::chrono::steady_clock;

}  // namespace

NcclLane::NcclLane(const nccl::Symbols& symbols) : symbols_(symbols) {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "tell the priorities of streams");
  check_cuda(cudaEventCreateWithFlags(&caller_, cudaEventDisableTiming), "create an event");
  // First in line: a transfer that is late holds up every other rank.
  const cudaError_t result = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest);
  if (result != cudaSuccess) static_cast<void>(cudaEventDestroy(caller_));
  check_cuda(result, "create a stream");
}

NcclLane::~NcclLane() {
  static_cast<void>(cudaStreamDestroy(stream_));
  static_cast<void>(cudaEventDestroy(caller_));
  static_cast<void>(cudaGetLastError());
}

void NcclLane::fail(Result result, const char* what, nccl::Comm communicator) const {
  const char* detail = symbols_.GetLastError(communicator);
  std::string text = std::string("NCCL could not ") + what + ": " + symbols_.GetErrorString(result);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  throw TransportError(text);
}

void NcclLane::check(Result result, const char* what) const {
  if (result != Result::success && result != Result::in_progress) fail(result, what, communicator_);
}

void NcclLane::settle(nccl::Comm communicator, const char* what, const Patience& patience) const {
  const Clock::time_point start = Clock::now();
  for (;;) {
    Result state = Result::success;
    const Result result = symbols_.CommGetAsyncError(communicator, &state);
    if (result != Result::success) fail(result, what, communicator);
    if (state == Result::success) return;
    if (state != Result::in_progress) fail(state, what, communicator);
    if (patience.give_up) throw TransportError(std::string("gave up to ") + what + ": the transport was aborted");
    const Clock::time_point now = Clock::now();
    if (now >= patience.deadline) throw TimeoutError(std::string("NCCL could not ") + what + " in time");
    // A launch takes some ten microseconds, and a rank that sleeps holds up the others; a connection takes long.
    if (now - start < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

void NcclLane::check_not_capturing() const {
  const cudaError_t result = cudaEventQuery(caller_);
  if (result == cudaErrorStreamCaptureUnsupported) {
    static_cast<void>(cudaGetLastError());
    throw TransportError("NCCL cannot connect while a CUDA graph is captured: run a collective before the capture");
  }
  check_cuda(result, "query an event");
}

void NcclLane::connect(const NcclOptions& options, const Patience& patience) {
  nccl::UniqueId id;
  std::memcpy(&id, options.unique_id.data(), sizeof(id));
  nccl::Config config;
  config.blocking = 0;
  check(symbols_.CommInitRankConfig(&communicator_, options.size, id, options.rank, &config), "connect");
  settle(communicator_, "connect", patience);
}

void NcclLane::connect_beside(NcclLane& first, int rank, const Patience& patience) {
  constexpr const char* kWhat = "make a second communicator";
  nccl::Config config;
  config.blocking = 0;
  // NCCL fills in communicator_ in the background; until then, `first` stands for both.
  first.check(symbols_.CommSplit(first.communicator_, 0, rank, &communicator_, &config), kWhat);
  settle(first.communicator_, kWhat, patience);
  settle(communicator_, kWhat, patience);
}

void NcclLane::follow(cudaStream_t stream) {
  check_cuda(cudaEventRecord(caller_, stream), "record an event");
  check_cuda(cudaStreamWaitEvent(stream_, caller_, 0), "make a stream wait");
}

template <class Calls>
void NcclLane::run_group(const Patience& patience, Calls&& calls) {
  constexpr const char* kWhat = "start a transfer";
  check(symbols_.GroupStart(), kWhat);
  Result first_error = Result::success;
  calls([&](Result result) {
    if (first_error == Result::success && result != Result::in_progress) first_error = result;
  });
  // Also after an error: groups are counted per thread.
  const Result result = symbols_.GroupEnd();
  check(first_error, kWhat);
  check(result, kWhat);
  // Until then the transfer may not be on the stream, and an event recorded there would come before it.
  settle(communicator_, kWhat, patience);
}

void NcclLane::exchange(std::span<const Send> sends, std::span<const Recv> recvs, const Patience& patience) {
  run_group(patience, [&](auto&& note) {
    for (const Send& send : sends) {
      if (send.num_bytes == 0) continue;
      note(symbols_.Send(send.data, send.num_bytes, nccl::DataType::int8, send.peer, communicator_, stream_));
    }
    for (const Recv& recv : recvs) {
      if (recv.num_bytes == 0) continue;
      note(symbols_.Recv(recv.data, recv.num_bytes, nccl::DataType::int8, recv.peer, communicator_, stream_));
    }
  });
}

void NcclLane::all_gather(std::byte* slots, std::size_t slot_bytes, int rank, const Patience& patience) {
  run_group(patience, [&](auto&& note) {
    const std::byte* own = slots + static_cast<std::size_t>(rank) * slot_bytes;
    note(symbols_.AllGather(own, slots, slot_bytes, nccl::DataType::int8, communicator_, stream_));
  });
}

void NcclLane::check_health() const {
  Result state = Result::success;
  const Result result = symbols_.CommGetAsyncError(communicator_, &state);
  check(result, "tell how it is");
  check(state, "go on");
}

bool NcclLane::close(const Patience& patience) noexcept {
  if (communicator_ == nullptr) return true;
  try {
    check(symbols_.CommFinalize(communicator_), "finish its work");
    settle(communicator_, "finish its work", patience);
    check(symbols_.CommDestroy(communicator_), "close");
    communicator_ = nullptr;
    return true;
  } catch (const Error&) {
    return false;
  }
}

void NcclLane::abort() noexcept {
  if (communicator_ == nullptr) return;
  static_cast<void>(symbols_.CommAbort(communicator_));
  communicator_ = nullptr;
}

}  // namespace zcomm
