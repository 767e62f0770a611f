#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "transport/nccl_transport.hpp"

namespace zcomm {
namespace {

using nccl::Result;
using Clock = std::chrono::steady_clock;

// Rejects NCCL_COMM_BLOCKING: it overrides the configuration, and blocking calls can neither time out nor be aborted.
void check_environment() {
  const char* text = std::getenv("NCCL_COMM_BLOCKING");
  if (text == nullptr || std::string(text) == "0") return;
  throw TransportError(std::string("NCCL_COMM_BLOCKING: expected it unset or 0, got ") + text +
                       ": a communicator that blocks cannot be aborted");
}

// NCCL gives a pair of two nodes 1 or 2 channels of 14 GB/s each. Pairs inside a node have no more, as all have as many
// as the pair with the fewest; and those of 8 ranks of a node share them (ncclP2pChannelBaseForRound of 2.27 to 2.30).
constexpr int kChannelsPerNetPeer = 4;
// All-to-alls of 64 ranks with 4 channels are reported to hang (NVIDIA/nccl issue 1835, of 2.27.7).
constexpr int kMostRanksAllToAll = 32;

// A channel takes a multiprocessor, and memory for each peer: in a node of 8 H100 NCCL would take 32 and 3.3 GB
// (NVIDIA/nccl issue 1685). One moves some 22 GB/s over NVLink, so that 16 are enough for the 360 GB/s of an H100.
constexpr int kMaxCtas = 16;

// NVLink of Blackwell is twice as fast. A group that has GPUs on both sides of this limit needs NCCL_MAX_CTAS, as NCCL
// wants one value of all ranks.
bool needs_few_ctas() {
  int device = 0;
  int major = 0;
  check_cuda(cudaGetDevice(&device), "tell the current device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "tell the compute capability");
  return major < 10;
}

// What NCCL is asked for. Its own variables win, as it applies the environment after the configuration; but it bounds
// NCCL_MIN_CTAS by max_ctas. The default of graph_usage_mode fits: graphs and eager calls mix. What
// launch_order_implicit of one communicator does to others is not documented.
nccl::Config configuration(int version, int size, std::span<const int> peers) {
  nccl::Config config = nccl::config_of(version);
  config.blocking = 0;
  config.comm_name = "zcomm";  // NCCL keeps the pointer
  // Before 2.28 only the environment has it, for torch's communicators, too: left to the user.
  const bool is_all_to_all = peers.size() + 1 == static_cast<std::size_t>(size);
  if (!is_all_to_all || size <= kMostRanksAllToAll) config.n_channels_per_net_peer = kChannelsPerNetPeer;
  // 2.30.7 uses it only where the channels of a peer are left to NCCL.
  if (!peers.empty()) config.max_p2p_peers = static_cast<int>(peers.size());
  if (needs_few_ctas() && std::getenv("NCCL_MIN_CTAS") == nullptr) config.max_ctas = kMaxCtas;
  return config;
}

}  // namespace

CallText NcclTexts::on_host(int rank) const {
  CallText text;
  std::memcpy(text.data(), host_.data() + offset(rank), sizeof(text));
  return text;
}

void NcclTexts::put(const std::string& words, cudaStream_t stream) {
  const CallText text = call_text(words);
  std::byte* const own = host_.data() + offset(rank_);
  std::memcpy(own, text.data(), sizeof(text));
  check_cuda(cudaMemcpyAsync(device_.data() + offset(rank_), own, sizeof(text), cudaMemcpyHostToDevice, stream),
             "copy the description of a call");
}

void NcclTexts::fetch(cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(host_.data(), device_.data(), host_.size(), cudaMemcpyDeviceToHost, stream),
             "copy the descriptions of a call");
  fetched_.record({stream});
}

NcclMessages NcclTexts::messages(std::span<const int> peers) const {
  NcclMessages all;
  for (const int peer : peers) {
    all.sends.push_back({peer, device_.data() + offset(rank_), sizeof(CallText)});
    all.recvs.push_back({peer, device_.data() + offset(peer), sizeof(CallText)});
  }
  return all;
}

std::string NcclTexts::difference(std::span<const int> peers) const {
  for (const int peer : peers) {
    if (std::string found = zcomm::difference(rank_, on_host(rank_), peer, on_host(peer)); !found.empty()) return found;
  }
  return {};
}

NcclCommunicator::NcclCommunicator() {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "tell the priorities of streams");
  // Highest priority: a late transfer delays all other ranks.
  check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "create a stream");
}

NcclCommunicator::~NcclCommunicator() {
  static_cast<void>(cudaStreamDestroy(stream_));
  static_cast<void>(cudaGetLastError());
}

void NcclCommunicator::fail(Result result, const char* what) const {
  const char* detail = nccl_.GetLastError(communicator_);
  std::string text = std::string("NCCL could not ") + what + ": " + nccl_.GetErrorString(result);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  throw TransportError(text);
}

void NcclCommunicator::check(Result result, const char* what) const {
  if (result != Result::success && result != Result::in_progress) fail(result, what);
}

void NcclCommunicator::settle(const char* what, const WaitGuard& patience) const {
  const Clock::time_point start = Clock::now();
  for (;;) {
    Result state = Result::success;
    const Result result = nccl_.CommGetAsyncError(communicator_, &state);
    if (result != Result::success) fail(result, what);
    if (state == Result::success) return;
    if (state != Result::in_progress) fail(state, what);
    patience(what);
    // Spins first: a launch takes about ten microseconds, and sleeping would delay the other ranks. Connecting takes
    // long.
    if (Clock::now() - start < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

void NcclCommunicator::check_not_capturing() const {
  auto own_captures = cudaStreamCaptureModeThreadLocal;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&own_captures));
  const cudaError_t result = cudaEventQuery(caller_.get());
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&own_captures));
  if (result == cudaErrorStreamCaptureUnsupported) {
    static_cast<void>(cudaGetLastError());
    throw TransportError("NCCL cannot connect while a CUDA graph is captured: run a collective before the capture");
  }
  check_cuda(result, "query an event");
}

void NcclCommunicator::connect(const NcclOptions& options, std::span<const int> peers, const WaitGuard& patience) {
  check_environment();
  const RelaxedCaptureGuard relaxed;
  rank_ = options.rank;
  size_ = options.size;
  int version = 0;
  check(nccl_.GetVersion(&version), "tell its version");
  nccl::Config config = configuration(version, size_, peers);
  check(nccl_.CommInitRankConfig(&communicator_, options.size, options.unique_id, options.rank, &config), "connect");
  settle("connect", patience);
  if (!peers.empty()) connect_peers(peers, options.agreement, patience);
}

// Connects by a small exchange: NCCL connects two ranks at their first group with a message, which waits for both.
void NcclCommunicator::connect_peers(std::span<const int> peers, const std::string& agreement,
                                     const WaitGuard& patience) {
  constexpr const char* kWhat = "connect with its peers";
  NcclTexts& texts = this->texts();
  texts.put(agreement, stream_);
  run(texts.messages(peers), patience);
  if (peers.size() + 1 == static_cast<std::size_t>(size_)) run(texts.gather(), patience);
  texts.fetch(stream_);
  while (!texts.are_fetched()) {
    check_health();
    patience(kWhat);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (const std::string found = texts.difference(peers); !found.empty()) throw TransportError(found);
  texts.is_used = false;
}

NcclTexts& NcclCommunicator::texts() {
  for (const auto& texts : texts_) {
    if (!texts->is_used.exchange(true)) return *texts;
  }
  return *texts_.emplace_back(std::make_unique<NcclTexts>(rank_, size_));
}

void NcclCommunicator::follow(StreamView stream) {
  caller_.record(stream);
  caller_.make_wait({stream_});
}

void NcclCommunicator::run(const NcclMessages& messages, const WaitGuard& patience) {
  constexpr const char* kWhat = "start a transfer";
  check(nccl_.GroupStart(), kWhat);
  Result first_error = Result::success;
  const auto note = [&](Result result) {
    if (first_error == Result::success && result != Result::in_progress) first_error = result;
  };
  for (const Send& send : messages.sends) {
    note(nccl_.Send(send.data, send.num_bytes, nccl::kInt8, send.peer, communicator_, stream_));
  }
  for (const Recv& recv : messages.recvs) {
    note(nccl_.Recv(recv.data, recv.num_bytes, nccl::kInt8, recv.peer, communicator_, stream_));
  }
  for (const std::span<std::byte> slots : messages.gathers) {
    const std::size_t slot_bytes = slots.size() / static_cast<std::size_t>(size_);
    const std::byte* own = slots.data() + static_cast<std::size_t>(rank_) * slot_bytes;
    note(nccl_.AllGather(own, slots.data(), slot_bytes, nccl::kInt8, communicator_, stream_));
  }
  // Ends the group also after an error: groups are counted per thread.
  const Result result = nccl_.GroupEnd();
  check(first_error, kWhat);
  check(result, kWhat);
  if (result == Result::success) {
    // NCCL starts the outermost group of a non-blocking communicator in the background, and returns in_progress. So the
    // thread has another group open, which still refers to the communicator.
    forget();
    throw TransportError(
        "ncclGroupStart: expected no open group on this thread, got one: NCCL would start the transfer at its end");
  }
  // Waits until the group is on the stream: an event recorded earlier would precede it.
  settle(kWhat, patience);
}

void NcclCommunicator::check_health() const {
  if (communicator_ == nullptr) return;  // after forget()
  Result state = Result::success;
  const Result result = nccl_.CommGetAsyncError(communicator_, &state);
  check(result, "tell how it is");
  check(state, "go on");
}

bool NcclCommunicator::close(const WaitGuard& patience) noexcept {
  if (communicator_ == nullptr) return true;
  try {
    check(nccl_.CommFinalize(communicator_), "finish its work");
    settle("finish its work", patience);
    check(nccl_.CommDestroy(communicator_), "close");
    communicator_ = nullptr;
    return true;
  } catch (const Error&) {
    return false;
  }
}

void NcclCommunicator::abort() noexcept {
  nccl::Comm aborted = nullptr;
  {
    const std::lock_guard lock(mutex_);
    aborted = std::exchange(communicator_, nullptr);
  }
  if (aborted != nullptr) static_cast<void>(nccl_.CommAbort(aborted));
}

}  // namespace zcomm
