#include <algorithm>
#include <barrier>
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

// By default NCCL gives a pair of ranks on two nodes 1 or 2 channels of 14 GB/s each. Pairs inside a node get the same
// number, and all 8 ranks of a node share these channels (ncclP2pChannelBaseForRound of NCCL 2.27 to 2.30). So each
// node has its own communicator.
constexpr int kChannelsPerNetPeer = 4;
// All-to-alls of 64 ranks with 4 channels are reported to hang (NVIDIA/nccl issue 1835, of 2.27.7).
constexpr int kMostRanksAllToAll = 32;

// A channel takes a multiprocessor, and memory for each peer: in a node of 8 H100 NCCL would take 32 and 3.3 GB
// (NVIDIA/nccl issue 1685). One moves some 22 GB/s over NVLink, so that 16 are enough for the 360 GB/s of an H100.
constexpr int kMaxCtas = 16;

// Beyond what NCCL gathers by PAT where each node has one GPU.
constexpr std::size_t kLargeGather = std::size_t{8} << 20;

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
nccl::Config configuration(int version, const char* name, std::size_t num_peers) {
  nccl::Config config = nccl::config_of(version);
  config.blocking = 0;
  config.comm_name = name;  // NCCL keeps the pointer
  // 2.30.7 uses it only where the channels of a peer are left to NCCL.
  if (num_peers > 0) config.max_p2p_peers = static_cast<int>(num_peers);
  if (needs_few_ctas() && std::getenv("NCCL_MIN_CTAS") == nullptr) config.max_ctas = kMaxCtas;
  return config;
}

bool shares_node(const NcclOptions& options, int a, int b) {
  return options.node_ids[static_cast<std::size_t>(a)] == options.node_ids[static_cast<std::size_t>(b)];
}

// Tells, alike on all ranks, whether some node of several has two ranks.
bool has_inside_and_outside(const NcclOptions& options) {
  std::vector<int> ids = options.node_ids;
  std::ranges::sort(ids);
  return !ids.empty() && ids.front() != ids.back() && std::ranges::adjacent_find(ids) != ids.end();
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

void NcclCommunicator::check(Result result, const char* what) const {
  if (result == Result::success || result == Result::in_progress) return;
  const char* detail = nccl_.GetLastError(communicator_);  // NCCL keeps one text for all
  std::string text = std::string("NCCL could not ") + what + ": " + nccl_.GetErrorString(result);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  throw TransportError(text);
}

void NcclCommunicator::settle(nccl::Comm communicator, const char* what, const WaitGuard& patience) const {
  const Clock::time_point start = Clock::now();
  for (;;) {
    Result state = Result::success;
    check(nccl_.CommGetAsyncError(communicator, &state), what);
    check(state, what);
    if (state == Result::success) return;
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
  nccl::check_environment();
  const RelaxedCaptureGuard relaxed;
  rank_ = options.rank;
  size_ = options.size;
  int version = 0;
  check(nccl_.GetVersion(&version), "tell its version");
  const bool splits = has_inside_and_outside(options);
  const auto num_inside = static_cast<std::size_t>(
      splits ? std::ranges::count_if(peers, [&](int peer) { return shares_node(options, peer, rank_); }) : 0);
  nccl::Config config = configuration(version, "zcomm", peers.size() - num_inside);
  // Before 2.28 only the environment has it, for torch's communicators, too: left to the user.
  const bool is_all_to_all = peers.size() + 1 == static_cast<std::size_t>(size_);
  if (!is_all_to_all || size_ <= kMostRanksAllToAll) config.n_channels_per_net_peer = kChannelsPerNetPeer;
  check(nccl_.CommInitRankConfig(&communicator_, options.size, options.unique_id, options.rank, &config), "connect");
  settle(communicator_, "connect", patience);
  if (splits) split(options, configuration(version, "zcomm in a node", num_inside), patience);
  if (!peers.empty()) connect_peers(peers, options.agreement, patience);
}

// Makes the communicators of the nodes. A rank that is alone in its node has one, too: NCCL 2.27 to 2.30 crash if a
// split fails on a rank without a color.
void NcclCommunicator::split(const NcclOptions& options, nccl::Config config, const WaitGuard& patience) {
  constexpr const char* kWhat = "connect inside the node";
  auto node = std::make_unique<NodeCommunicator>();
  int num_inside = 0;
  for (int rank = 0; rank < size_; ++rank) {
    node->ranks.push_back(shares_node(options, rank, rank_) ? num_inside++ : -1);
  }
  const auto node_id = options.node_ids[static_cast<std::size_t>(rank_)];
  const auto color = std::ranges::find(options.node_ids, node_id) - options.node_ids.begin();
  nccl::Comm& made = node->communicator;
  node_ = std::move(node);  // NCCL may write to it for as long as the group's communicator is there
  check(nccl_.CommSplit(communicator_, static_cast<int>(color), rank_, &made, &config), kWhat);
  settle(communicator_, kWhat, patience);
  settle(made, kWhat, patience);
  int size = 0;
  check(nccl_.CommCount(made, &size), kWhat);
  if (size != num_inside) {
    throw TransportError(concat("node_ids: expected equal ones on all ranks, got a node of ", num_inside,
                                " ranks on rank ", rank_, " where its peers have a node of ", size));
  }
}

// Connects by a small exchange: NCCL connects two ranks at their first group with a message, which waits for both.
void NcclCommunicator::connect_peers(std::span<const int> peers, const std::string& agreement,
                                     const WaitGuard& patience) {
  constexpr const char* kWhat = "connect with its peers";
  NcclTexts& texts = this->texts();
  texts.put(agreement, stream());
  const NcclMessages messages = texts.messages(peers);
  fork(messages);
  run(messages, patience);
  join(messages);
  if (peers.size() + 1 == static_cast<std::size_t>(size_)) {
    run(texts.gather(), patience);
    // NCCL takes another algorithm for large gathers, and connects what that needs when it first does.
    large_.emplace(kLargeGather / static_cast<std::size_t>(size_) * static_cast<std::size_t>(size_));
    run({{}, {}, {{large_->data(), large_->size()}}}, patience);
  }
  texts.fetch(stream());
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
  caller_.make_wait(stream_.view());
}

void NcclCommunicator::fork(const NcclMessages& messages) {
  if (!has_inside(messages)) return;
  node_->begin.record(stream_.view());
  node_->begin.make_wait(node_->stream.view());
}

void NcclCommunicator::join(const NcclMessages& messages) {
  if (!has_inside(messages)) return;
  node_->end.record(node_->stream.view());
  node_->end.make_wait(stream_.view());
}

void NcclCommunicator::run(const NcclMessages& messages, const WaitGuard& patience) {
  constexpr const char* kWhat = "start a transfer";
  check(nccl_.GroupStart(), kWhat);
  Result first_error = add(messages, /*inside=*/false);
  if (first_error == Result::success && has_inside(messages)) first_error = add(messages, /*inside=*/true);
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
  settle(communicator_, kWhat, patience);
  if (has_inside(messages)) settle(node_->communicator, kWhat, patience);
}

bool NcclCommunicator::has_inside(const NcclMessages& messages) const {
  const auto is_inside = [this](const auto& message) { return this->is_inside(message.peer); };
  return std::ranges::any_of(messages.sends, is_inside) || std::ranges::any_of(messages.recvs, is_inside);
}

Result NcclCommunicator::add(const NcclMessages& messages, bool inside) const {
  const nccl::Comm communicator = inside ? node_->communicator : communicator_;
  const cudaStream_t stream = inside ? node_->stream.get() : stream_.get();
  const auto rank_in_it = [&](int peer) { return inside ? node_->ranks[static_cast<std::size_t>(peer)] : peer; };
  Result first_error = Result::success;
  const auto note = [&](Result result) {
    if (first_error == Result::success && result != Result::in_progress) first_error = result;
  };
  for (const Send& send : messages.sends) {
    if (is_inside(send.peer) != inside) continue;
    note(nccl_.Send(send.data, send.num_bytes, nccl::kInt8, rank_in_it(send.peer), communicator, stream));
  }
  for (const Recv& recv : messages.recvs) {
    if (is_inside(recv.peer) != inside) continue;
    note(nccl_.Recv(recv.data, recv.num_bytes, nccl::kInt8, rank_in_it(recv.peer), communicator, stream));
  }
  if (inside) return first_error;
  for (const std::span<std::byte> slots : messages.gathers) {
    const std::size_t slot_bytes = slots.size() / static_cast<std::size_t>(size_);
    const std::byte* own = slots.data() + static_cast<std::size_t>(rank_) * slot_bytes;
    note(nccl_.AllGather(own, slots.data(), slot_bytes, nccl::kInt8, communicator, stream));
  }
  return first_error;
}

void NcclCommunicator::check_health() const {
  if (communicator_ == nullptr) return;  // after abort() or forget()
  for (const nccl::Comm communicator : {communicator_, node_ ? node_->communicator : communicator_}) {
    Result state = Result::success;
    check(nccl_.CommGetAsyncError(communicator, &state), "tell how it is");
    check(state, "go on");
  }
}

bool NcclCommunicator::close(const WaitGuard& patience) noexcept {
  if (communicator_ == nullptr) return true;
  try {
    if (node_) close(node_->communicator, patience);
    close(communicator_, patience);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void NcclCommunicator::close(nccl::Comm& communicator, const WaitGuard& patience) {
  if (communicator == nullptr) return;
  check(nccl_.CommFinalize(communicator), "finish its work");
  settle(communicator, "finish its work", patience);
  check(nccl_.CommDestroy(communicator), "close");
  communicator = nullptr;
}

void NcclCommunicator::abort() noexcept {
  nccl::Comm group = nullptr;
  nccl::Comm node = nullptr;
  {
    const std::lock_guard lock(mutex_);
    group = std::exchange(communicator_, nullptr);
    if (node_) node = node_->load();
  }
  if (group == nullptr) return;
  if (node == nullptr) {
    static_cast<void>(nccl_.CommAbort(group));
    // A split that the abort interrupted may have left a communicator.
    if (node_) node = node_->load();
    if (node != nullptr) static_cast<void>(nccl_.CommAbort(node));
    return;
  }
  // CommAbort tells one communicator's kernels to end, then waits for the launch of the whole group. That launch may
  // wait for the other communicator's kernels, so another thread aborts it. GroupEnd frees memory, once both are told.
  std::barrier<> are_told(2);
  const auto abort_one = [&](nccl::Comm communicator) {
    static_cast<void>(nccl_.GroupStart());
    static_cast<void>(nccl_.CommAbort(communicator));
    are_told.arrive_and_wait();
    static_cast<void>(nccl_.GroupEnd());
  };
  int device = 0;
  static_cast<void>(cudaGetDevice(&device));
  std::thread beside([&, device] {
    static_cast<void>(cudaSetDevice(device));
    const RelaxedCaptureGuard relaxed;
    abort_one(node);
  });
  abort_one(group);
  beside.join();
}

}  // namespace zcomm
