// Detection and handling of failed transfers.
#include <algorithm>

#include "host/detached.hpp"
#include "transport/nccl_transport.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Intervals at which the watchdog checks transfers in progress, and queries peers for failures.
constexpr auto kWatchInterval = 50ms;
constexpr auto kPeerInterval = 1s;
// Time in a call of CUDA or NCCL after which others look for what the watchdog looks for.
constexpr auto kKeptTime = 1s;
// Time limits of a failure for the peers' answer, and for on_failure.
constexpr auto kAskTimeout = 1s;
constexpr auto kTellTimeout = 2s;

// Aborts on a separate thread, because NCCL's abort waits for the device and for graphs.
void abort_aside(std::shared_ptr<NcclCommunicator> communicator, int device,
                 std::shared_ptr<std::promise<void>> aborted) {
  static_cast<void>(
      run_detached([communicator = std::move(communicator), device, aborted = std::move(aborted)]() mutable {
        static_cast<void>(cudaSetDevice(device));
        const RelaxedCaptureGuard relaxed;
        if (communicator != nullptr) communicator->abort();
        communicator.reset();
        aborted->set_value();
      }));
}

void check_deadline(const NcclCall& call) {
  if (Clock::now() < call.deadline) return;
  throw TimeoutError(concat(call.in(), "not done within the timeout, ", call.timeout.count(),
                            " ms: a peer is stuck or gone, or called something else"));
}

}  // namespace

// Throws the recorded failure once its reason is complete.
void NcclTransport::throw_failure(const char* prefix) {
  std::unique_lock lock(state_mutex_);
  changed_.wait_for(lock, kAskTimeout + kTellTimeout, [&] { return is_told_; });
  const std::string reason = prefix + failure_.value();
  if (is_timeout_) throw TimeoutError(reason);
  throw TransportError(reason);
}

bool NcclTransport::has_failed() const {
  const std::lock_guard lock(state_mutex_);
  return failure_.has_value();
}

void NcclTransport::throw_if_failed() {
  if (has_failed()) throw_failure("this transport failed before: ");
}

// Aborts first, unless the process is to end before: neither the query of peers nor on_failure can delay that.
void NcclTransport::fail(const std::string& prefix, const Error& error, bool ask, bool is_late) noexcept {
  const bool may_end = is_late && options_.on_undefined_bytes;
  std::string reason = prefix + error.what();
  const auto aborted = std::make_shared<std::promise<void>>();
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_) return;
    failure_ = reason;
    is_timeout_ = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    give_up_ = true;
    abort_ = aborted->get_future();
  }
  if (!may_end) abort_aside(communicator_, device_, aborted);
  try {
    if (ask && options_.peer_failure) {
      auto answer = run_detached(options_.peer_failure);
      if (answer.wait_for(kAskTimeout) == std::future_status::ready) {
        const std::string peers = answer.get();
        if (reason.find(peers) == std::string::npos) reason += " (" + peers + ")";
      }
    }
  } catch (...) {
    // The query failed; the reason stays as it is.
  }
  {
    const std::lock_guard lock(state_mutex_);
    failure_ = reason;
  }
  try {
    if (options_.on_failure) {
      const auto told = run_detached([tell = options_.on_failure, reason] { tell(reason); });
      static_cast<void>(told.wait_for(kTellTimeout));
    }
  } catch (...) {
    // No thread could be started; peers will time out, as they do if the notification fails.
  }
  {
    const std::lock_guard lock(state_mutex_);
    is_told_ = true;
  }
  changed_.notify_all();
  if (!may_end) return;
  options_.on_undefined_bytes(reason);
  abort_aside(communicator_, device_, aborted);
}

void NcclTransport::watch_all() {
  ask("cudaSetDevice", [this] { return cudaSetDevice(device_) == cudaSuccess; });
  const RelaxedCaptureGuard relaxed;
  const auto is_over = [&] { return is_closing_ || failure_; };
  std::unique_lock lock(state_mutex_);
  while (!is_over()) {
    if (!is_busy_) {
      changed_.wait(lock, [&] { return is_over() || is_busy_; });
      continue;
    }
    changed_.wait_for(lock, kWatchInterval, is_over);
    is_busy_ = was_captured_ || is_launching_;  // others may set it again meanwhile
    is_looking_ = true;
    lock.unlock();
    bool has_more = false;
    try {
      has_more = look_at_all();
    } catch (const Error& error) {
      fail("", error, /*ask=*/true, /*is_late=*/true);
    }
    lock.lock();
    is_looking_ = false;
    is_busy_ |= has_more;
  }
  is_watchdog_over_ = true;
  lock.unlock();
  changed_.notify_all();
}

void NcclTransport::note_asked(const char* function) {
  const std::lock_guard lock(state_mutex_);
  asked_ = function;
  asked_at_ = Clock::now();
}

template <class Look>
bool NcclTransport::ask(const char* function, Look&& look) {
  note_asked(function);
  try {
    const bool has_more = look();
    note_asked(nullptr);
    return has_more;
  } catch (...) {
    note_asked(nullptr);
    throw;
  }
}

bool NcclTransport::look_at_all() {
  const bool has_transfers = ask("cudaEventQuery", [this] { return look_at_transfers(); });
  const bool has_findings = ask("cudaEventQuery", [this] { return look_at_findings(); });
  ask("ncclCommGetAsyncError", [this] { return look_at_communicator(), false; });
  return has_transfers || has_findings;
}

// Ends after the watchdog: a failure may be what it is kept by.
void NcclTransport::watch_watchdog() {
  next_question_ = Clock::now() + kPeerInterval;
  bool is_told = false;
  std::unique_lock lock(state_mutex_);
  while (!is_watchdog_over_) {
    if (!is_busy_ && !is_looking_) {
      changed_.wait(lock, [&] { return is_watchdog_over_ || is_busy_; });
      continue;
    }
    changed_.wait_for(lock, kWatchInterval, [&] { return is_watchdog_over_; });
    const auto kept = asked_ == nullptr ? 0s : std::chrono::floor<std::chrono::seconds>(Clock::now() - asked_at_);
    const bool is_stuck = !is_told && options_.on_stuck && options_.heartbeat > 0s && kept >= options_.heartbeat;
    const std::string stuck = !is_stuck ? std::string()
                                        : concat(call_->in(), asked_, " has kept the watchdog for ", kept.count(),
                                                 " s: another thread may hold a lock inside CUDA or NCCL");
    const bool is_over = is_closing_ || failure_;
    lock.unlock();
    if (is_stuck) options_.on_stuck(stuck);
    is_told |= is_stuck;
    if (!is_over) look_beside_watchdog(kept >= kKeptTime);
    lock.lock();
  }
}

void NcclTransport::look_beside_watchdog(bool is_kept) {
  std::shared_ptr<const NcclCall> due;
  {
    const std::lock_guard lock(state_mutex_);
    if (is_kept) due = first_due_;
  }
  bool asks = true;
  try {
    if (due != nullptr) check_deadline(*due);
    asks = false;
    look_at_peers();
  } catch (const Error& error) {
    fail("", error, asks, /*is_late=*/true);
  }
}

bool NcclTransport::look_at_transfers() {
  const std::lock_guard lock(groups_mutex_);
  try {
    collect_done();
  } catch (const Error& error) {
    throw TransportError(call()->in() + error.what());
  }
  note_first_due();
  for (const NcclGroup* group : watched_groups_) check_deadline(*group->call);
  return !watched_groups_.empty();
}

void NcclTransport::note_first_due() {
  const auto first =
      std::ranges::min_element(watched_groups_, {}, [](const NcclGroup* g) { return g->call->deadline; });
  const std::lock_guard lock(state_mutex_);
  first_due_ = first == watched_groups_.end() ? nullptr : (*first)->call;
}

bool NcclTransport::look_at_findings() {
  const std::lock_guard lock(groups_mutex_);
  for (auto next = deferred_checks_.begin(); next != deferred_checks_.end();) {
    const std::optional<std::string> wrong = (*next)();
    if (!wrong) {
      ++next;
      continue;
    }
    known_checks_.push_back(std::move(*next));
    next = deferred_checks_.erase(next);
    if (!wrong->empty()) throw TransportError(*wrong);
  }
  return !deferred_checks_.empty();
}

void NcclTransport::look_at_communicator() {
  // Skips the check while another thread is inside NCCL: that thread sees the errors, and NCCL allows one at a time.
  const std::unique_lock lock(communicator_->mutex(), std::try_to_lock);
  if (!lock || give_up_) return;
  try {
    communicator_->check_health();
  } catch (const TransportError& error) {
    throw TransportError(call()->in() + error.what());
  }
}

void NcclTransport::look_at_peers() {
  const std::string peers = ask_peers(kPeerInterval);
  if (!peers.empty()) throw TransportError(call()->in() + peers);
}

// Polls the answer without waiting for it.
std::string NcclTransport::ask_peers(std::chrono::milliseconds interval) {
  if (!options_.peer_failure) return {};
  const auto now = Clock::now();
  try {
    if (!answer_.valid() && now >= next_question_) answer_ = run_detached(options_.peer_failure);
    if (!answer_.valid() || answer_.wait_for(0s) != std::future_status::ready) return {};
    next_question_ = now + interval;
    return answer_.get();
  } catch (...) {
    next_question_ = now + interval;
    return {};  // the query failed, or no thread could be started for it; the next one may succeed
  }
}

}  // namespace zcomm
