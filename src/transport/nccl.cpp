#include <algorithm>
#include <cstdio>
#include <functional>

#include "transport/nccl_transport.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Time limits for closing an idle communicator or an abort, and for communicators that a graph may still need.
constexpr auto kCloseTimeout = 10s;
constexpr auto kGraphTimeout = 1s;
// Interval at which a rank that waits for NCCL looks for an interruption and, while it connects, for failures of peers.
constexpr auto kLookInterval = 100ms;

}  // namespace

NcclTransport::NcclTransport(const NcclOptions& options) : options_(options) {
  check_argument(options.rank >= 0 && options.rank < options.size, "rank: expected 0 to ", options.size - 1, ", got ",
                 options.rank);
  check_argument(options.node_ids.empty() || options.node_ids.size() == static_cast<std::size_t>(options.size),
                 "node_ids: expected ", options.size, " identifiers, got ", options.node_ids.size());
  or_fail([this] {
    check_cuda(cudaGetDevice(&device_), "tell the current device");
    lanes_ = std::make_unique<CudaLanes>();
    communicator_ = std::make_shared<NcclCommunicator>();
  });
  communicator_->check_not_capturing();
  or_fail([this] { connect(); });
}

// Runs a step of the constructor, whose failure peers are told.
template <class Step>
void NcclTransport::or_fail(Step&& step) {
  try {
    step();
  } catch (const Error& error) {
    fail_and_throw("", error);
  } catch (...) {  // an interruption of the caller's
    fail("", TransportError("was interrupted while it connected over NCCL"), /*ask=*/false);
    wait_for_abort();
    throw;
  }
}

void NcclTransport::fail_and_throw(const std::string& prefix, const Error& error) {
  fail(prefix, error, /*ask=*/true);
  wait_for_abort();  // NCCL may still launch the work that this thread gave up
  throw_failure("");
}

void NcclTransport::connect() {
  const Clock::time_point deadline = deadline_after(options_.connect_timeout);
  try {
    is_connected_.resize(static_cast<std::size_t>(size()));
    std::vector<int> peers = options_.peers;
    for (int peer = 0; options_.peers.empty() && peer < size(); ++peer) {
      if (peer != rank()) peers.push_back(peer);
    }
    for (const int peer : peers) is_connected_[static_cast<std::size_t>(peer)] = true;
    const std::lock_guard lock(communicator_->mutex());
    communicator_->connect(options_, peers, [&](const char* what) {
      check_wait(what, deadline);
      look("connect over NCCL", /*asks_peers=*/true);
    });
  } catch (const TimeoutError&) {
    throw TimeoutError(concat("rank ", rank(), " of ", size(), " could not connect over NCCL within ",
                              options_.connect_timeout.count(), " ms: not all ranks came"));
  }
}

void NcclTransport::check_wait(const char* what, Clock::time_point deadline) const {
  if (give_up_) throw TransportError(std::string("gave up to ") + what + ": the transport was aborted");
  if (Clock::now() >= deadline) throw TimeoutError(std::string("NCCL could not ") + what + " in time");
}

void NcclTransport::look(const char* what, bool asks_peers) {
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kLookInterval;
  std::string why = options_.interruption ? options_.interruption() : std::string();
  if (why.empty() && asks_peers) why = ask_peers(kLookInterval);
  if (!why.empty()) throw TransportError(std::string("gave up to ") + what + ": " + why);
}

NcclTransport::~NcclTransport() {
  const bool all_done = finish_transfers(Clock::now() + kCloseTimeout);
  {
    const std::lock_guard lock(state_mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  if (monitor_.joinable()) monitor_.join();
  if (all_done) close();
  try {
    const CudaDeviceGuard device(device_);  // destroying an event elsewhere would give that device a context
    groups_.clear();
    deferred_checks_.clear();
    known_checks_.clear();
    communicator_.reset();
    lanes_.reset();
  } catch (const Error&) {
    // The device is lost.
  }
}

void NcclTransport::close() noexcept {
  // Closes with a time limit: a graph that captured transfers needs the communicator, and NCCL waits for the graph to
  // be destroyed. This code cannot see graphs, so after the limit it leaves the communicator open for good.
  const Clock::time_point deadline = Clock::now() + (was_captured_ ? kGraphTimeout : kCloseTimeout);
  try {
    const CudaDeviceGuard device(device_);
    const std::lock_guard lock(communicator_->mutex());
    if (communicator_->close([&](const char* what) { check_wait(what, deadline); })) return;
    if (was_captured_) return communicator_->forget();
  } catch (const Error&) {
    // The device is lost.
  }
  fail("", TransportError("the transport did not close"), /*ask=*/false);
  wait_for_abort();
}

// Waits for all transfers. Returns false if the transport fails, earlier or here. The watchdog bounds the wait,
// `latest` that for calls without a timeout.
bool NcclTransport::finish_transfers(Clock::time_point latest) noexcept {
  try {
    const CudaDeviceGuard device(device_);
    while (!has_failed()) {
      {
        const std::lock_guard lock(groups_mutex_);
        collect_done();
        if (watched_groups_.empty() && deferred_checks_.empty()) return true;
      }
      if (call()->deadline == Clock::time_point::max() && Clock::now() >= latest) break;
      std::this_thread::sleep_for(1ms);
    }
  } catch (const Error&) {
    // The device is lost.
  }
  fail("", TransportError("the transport was closed with transfers under way"), /*ask=*/false);
  wait_for_abort();
  return false;
}

// Waits until NCCL uses no caller's memory any more, as far as this can be known. With a graph that captured transfers
// the abort may never return, but its work ends soon.
void NcclTransport::wait_for_abort() noexcept {
  std::shared_future<void> aborted;
  {
    const std::lock_guard lock(state_mutex_);
    aborted = abort_;
  }
  if (was_captured_) {
    aborted.wait_for(kGraphTimeout);
  } else if (aborted.wait_for(kCloseTimeout) != std::future_status::ready) {
    std::fprintf(stderr, "zcomm, rank %d: NCCL has not aborted a communicator within %d s; it is left behind\n", rank(),
                 static_cast<int>(kCloseTimeout.count()));
  }
}

void NcclTransport::begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                          StreamView stream) {
  std::vector<DeferredCheck> known;  // destroyed without the lock
  {
    const std::lock_guard lock(groups_mutex_);
    known.swap(known_checks_);
  }
  check();
  open_group_ = nullptr;
  auto fresh = std::make_shared<const NcclCall>(NcclCall{call, timeout, deadline_after(timeout)});
  {
    const std::lock_guard lock(state_mutex_);
    call_ = std::move(fresh);
  }
  // Two ranks of more may exchange a message, whose sender does not wait for the receiver.
  const bool may_be_message = peers.size() == 1 && size() > 2;
  if (may_be_message || is_capturing(stream)) return;
  // Equal words have equal peers. So two ranks that exchange bytes have compared the same words before.
  if (!compared_.insert(std::hash<std::string>{}(call)).second) return;
  std::vector<int> connected;
  std::ranges::copy_if(peers, std::back_inserter(connected),
                       [&](int peer) { return is_connected_[static_cast<std::size_t>(peer)]; });
  if (!connected.empty()) compare(call, connected, stream);
}

void NcclTransport::compare(const std::string& call, std::span<const int> peers, StreamView stream) {
  const CudaDeviceGuard device(device_);
  NcclTexts& texts = communicator_->texts();
  texts.put(call, communicator_->stream());
  const bool has_all = peers.size() + 1 == static_cast<std::size_t>(size());
  NcclGroup& group = take_group();
  group.messages = has_all ? texts.gather() : texts.messages(peers);
  launch(group, stream);
  texts.fetch(communicator_->stream());
  watch([&texts, call, peers = std::vector<int>(peers.begin(), peers.end())]() -> std::optional<std::string> {
    if (!texts.are_fetched()) return std::nullopt;
    const std::string found = texts.difference(peers);
    texts.is_used = false;
    return found.empty() ? found : "in " + call + ": " + found;
  });
}

// Asks the transport's stream, as the caller's of an earlier call may be gone.
void NcclTransport::check_stream(StreamView stream) const {
  if (has_failed()) return;  // begin() says why
  const std::uint64_t graph = capture_of({communicator_->stream()});
  check_argument(graph == 0 || capture_of(stream) == graph,
                 "stream: expected one of the CUDA graph that is captured with calls of this group, got another: wait "
                 "for the end of the capture");
}

void NcclTransport::check() {
  throw_if_failed();
  try {
    look_at_findings();
  } catch (const Error& error) {
    fail("", error, /*ask=*/false);
    throw_failure("");
  }
}

std::shared_ptr<const NcclCall> NcclTransport::call() const {
  const std::lock_guard lock(state_mutex_);
  return call_;
}

void NcclTransport::begin_group() { open_group_ = &take_group(); }

void NcclTransport::end_group(StreamView stream) {
  NcclGroup* const group = std::exchange(open_group_, nullptr);
  if (group == nullptr) return;
  if (group->num_waits > 0) return launch(*group, stream);
  const std::lock_guard lock(groups_mutex_);
  put_back_if_over(*group);
}

NcclGroup& NcclTransport::take_group() {
  try {
    {
      const std::lock_guard lock(groups_mutex_);
      if (idle_groups_.empty()) collect_done();
      if (!idle_groups_.empty()) {
        NcclGroup* const idle = idle_groups_.back();
        idle_groups_.pop_back();
        return *idle;
      }
    }
    const CudaDeviceGuard device(device_);
    auto made = std::make_unique<NcclGroup>();
    const std::lock_guard lock(groups_mutex_);
    idle_groups_.reserve(groups_.size() + 1);  // so that putting one back never allocates
    watched_groups_.reserve(groups_.size() + 1);
    return *groups_.emplace_back(std::move(made));
  } catch (const Error& error) {
    fail_and_throw(call()->in(), error);
  }
}

void NcclTransport::put_back_if_over(NcclGroup& group) {
  if (group.num_waits > 0 || group.is_watched) return;
  group.messages = {};
  group.call.reset();
  idle_groups_.push_back(&group);
}

void NcclTransport::collect_done() {
  auto next = watched_groups_.begin();
  for (; next != watched_groups_.end() && (*next)->done.is_over("finish a transfer"); ++next) {
    (*next)->is_watched = false;
    put_back_if_over(**next);
  }
  watched_groups_.erase(watched_groups_.begin(), next);
}

std::unique_ptr<Transfer> NcclTransport::add_transfer(NcclGroup& group, StreamView stream) {
  ++group.num_waits;
  if (&group != open_group_) launch(group, stream);
  return std::make_unique<NcclTransfer>(*this, &group);
}

std::unique_ptr<Transfer> NcclTransport::start(std::span<const Send> sends, std::span<const Recv> recvs,
                                               StreamView stream) {
  const auto moves = [](const auto& message) { return message.num_bytes > 0; };
  const bool has_upper_bounds =
      std::any_of(recvs.begin(), recvs.end(), [](const Recv& recv) { return recv.is_upper_bound; });
  check_argument(!has_upper_bounds, "recvs: expected known sizes, as NCCL needs, got a limit");
  throw_if_failed();
  const bool is_empty =
      std::none_of(sends.begin(), sends.end(), moves) && std::none_of(recvs.begin(), recvs.end(), moves);
  if (is_empty) return std::make_unique<NcclTransfer>(*this, nullptr);
  NcclGroup& group = join_group();
  std::copy_if(sends.begin(), sends.end(), std::back_inserter(group.messages.sends), moves);
  std::copy_if(recvs.begin(), recvs.end(), std::back_inserter(group.messages.recvs), moves);
  return add_transfer(group, stream);
}

std::unique_ptr<Transfer> NcclTransport::all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) {
  throw_if_failed();
  if (size() == 1 || slot_bytes == 0) return std::make_unique<NcclTransfer>(*this, nullptr);
  NcclGroup& group = join_group();
  group.messages.gathers.emplace_back(slots, slot_bytes * static_cast<std::size_t>(size()));
  return add_transfer(group, stream);
}

// Holds no lock while it submits work: CUDA blocks the host when a launch queue is full.
void NcclTransport::launch(NcclGroup& group, StreamView stream) {
  throw_if_failed();
  next_look_ = Clock::now() + kLookInterval;
  try {
    const CudaDeviceGuard device(device_);
    group.call = call();
    group.is_captured = is_capturing(stream);
    if (group.is_captured) was_captured_ = true;
    // The watchdog watches meanwhile: NCCL may connect ranks here, which waits for them. A failure ends it, too.
    is_launching_ = true;
    wake_watchdog();
    communicator_->follow(stream);
    communicator_->fork(group.messages);
    {
      const std::lock_guard lock(communicator_->mutex());
      if (give_up_) throw TransportError("gave up to start a transfer: the transport was aborted");
      communicator_->run(group.messages, [this, &group](const char* what) {
        check_wait(what, group.call->deadline);
        look(what, /*asks_peers=*/false);
      });
    }
    communicator_->join(group.messages);
    group.done.record({communicator_->stream()});
    if (!group.is_captured) {
      const std::lock_guard lock(groups_mutex_);
      watched_groups_.push_back(&group);
      group.is_watched = true;
      note_first_due();
    }
    is_launching_ = false;
  } catch (const Error& error) {
    fail_and_throw(call()->in(), error);
  } catch (...) {  // an interruption of the caller's
    fail(call()->in(), TransportError("was interrupted while it started a transfer"), /*ask=*/false);
    wait_for_abort();
    throw;
  }
}

void NcclTransport::watch(DeferredCheck finding) {
  {
    const std::lock_guard lock(groups_mutex_);
    deferred_checks_.push_back(std::move(finding));
  }
  wake_watchdog();
}

void NcclTransport::wake_watchdog() {
  {
    const std::lock_guard lock(state_mutex_);
    if (!watchdog_.joinable()) {
      watchdog_ = std::thread([this] { watch_all(); });
      monitor_ = std::thread([this] { watch_watchdog(); });
    }
    if (std::exchange(is_busy_, true)) return;
  }
  changed_.notify_all();
}

void NcclTransport::wait(NcclGroup& group, StreamView stream) {
  throw_if_failed();
  if (group.call == nullptr) throw TransportError("a transfer was waited for before its group was ended");
  const CudaDeviceGuard device(device_);
  group.done.make_wait(stream);
  const std::lock_guard lock(groups_mutex_);
  --group.num_waits;
  put_back_if_over(group);
}

void NcclTransport::give_up(const NcclGroup& group) noexcept {
  fail(call()->in(), TransportError("this rank abandoned a transfer before it completed"), /*ask=*/false);
  if (group.call == nullptr || group.is_captured) return;
  // Waits, because the transfer's memory may be freed as soon as this returns.
  const Clock::time_point latest = Clock::now() + kCloseTimeout;
  try {
    for (; Clock::now() < latest; std::this_thread::sleep_for(1ms)) {
      const std::lock_guard lock(groups_mutex_);
      collect_done();
      if (!group.is_watched) return;
    }
  } catch (const Error&) {
    // The device is lost, and its memory with it.
  }
}

std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options) {
  return std::make_unique<NcclTransport>(options);
}

}  // namespace zcomm
