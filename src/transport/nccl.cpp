#include "zcomm/nccl.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "transport/nccl_flights.hpp"
#include "transport/nccl_lane.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How often the watchdog looks at the transfers that are under way, and asks for what peers say.
constexpr auto kWatchInterval = 50ms;
constexpr auto kPeerInterval = 1s;
// How long communicators without work may take to close, and those that a graph may still need.
constexpr auto kCloseTimeout = 10s;
constexpr auto kGraphTimeout = 1s;

struct Failure {
  std::string reason;
  bool is_timeout = false;
};

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const NcclOptions& options);
  ~NcclTransport() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  void begin(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout) override;
  std::unique_ptr<Transfer> start(std::span<const Send> sends, std::span<const Recv> recvs, StreamView stream) override;
  std::unique_ptr<Transfer> all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) override;
  void abort(const std::string& reason) noexcept override { fail({reason, false}); }

  void wait(Flight& flight, StreamView stream);
  void give_up(const Flight& flight) noexcept;

 private:
  void connect();
  // group(lane, patience) starts a transfer.
  template <class Group>
  std::unique_ptr<Transfer> launch(bool is_empty, StreamView stream, Group&& group);

  void fail(Failure failure) noexcept;
  [[noreturn]] void throw_failure(const char* prefix) const;
  void throw_if_failed() const;
  std::string what_peers_say() const noexcept;

  void watch();
  std::optional<Failure> look_at_transfers();
  std::optional<Failure> look_at_communicators();
  bool finish_transfers();

  const NcclOptions options_;
  int device_ = 0;
  // Held by whoever is inside NCCL or changes the lanes; taken before state_mutex_.
  std::mutex nccl_mutex_;
  std::array<std::unique_ptr<NcclLane>, NcclFlights::kNumLanes> lanes_;
  std::size_t num_started_ = 0;  // since begin()
  bool was_captured_ = false;
  std::atomic<bool> give_up_{false};  // makes those who poll NCCL leave it

  mutable std::mutex state_mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const NcclCall> call_ = std::make_shared<NcclCall>();
  NcclFlights flights_;
  std::optional<Failure> failure_;  // never changes once it is there
  bool is_aborted_ = false;
  bool is_closing_ = false;
  std::thread watchdog_;  // since the first transfer
};

class NcclTransfer final : public Transfer {
 public:
  // A null flight moves nothing.
  NcclTransfer(NcclTransport& transport, Flight* flight) : transport_(transport), flight_(flight) {}
  ~NcclTransfer() override {
    if (flight_ != nullptr) transport_.give_up(*flight_);
  }
  void wait(StreamView stream) override {
    if (flight_ == nullptr) return;
    transport_.wait(*flight_, stream);
    flight_ = nullptr;
  }

 private:
  NcclTransport& transport_;
  Flight* flight_;
};

NcclTransport::NcclTransport(const NcclOptions& options) : options_(options) {
  check_argument(options.rank >= 0 && options.rank < options.size, [&] {
    return "rank: got " + std::to_string(options.rank) + ", need 0 to " + std::to_string(options.size - 1);
  });
  check_cuda(cudaGetDevice(&device_), "tell the current device");
  try {
    connect();
  } catch (...) {
    for (const auto& lane : lanes_) {
      if (lane) lane->abort();
    }
    throw;
  }
}

void NcclTransport::connect() {
  for (auto& lane : lanes_) lane = std::make_unique<NcclLane>(nccl::library().symbols);
  lanes_[0]->check_not_capturing();
  const Patience patience{Clock::now() + options_.connect_timeout, give_up_};
  try {
    lanes_[0]->connect(options_, patience);
    lanes_[1]->connect_beside(*lanes_[0], options_.rank, patience);
  } catch (const TimeoutError&) {
    throw TimeoutError("rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.size) +
                       " could not connect over NCCL within " + std::to_string(options_.connect_timeout.count()) +
                       " ms: not all ranks came");
  }
}

NcclTransport::~NcclTransport() {
  const bool all_done = finish_transfers();
  {
    const std::lock_guard lock(state_mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  if (!all_done) return;
  // A graph that captured transfers needs the communicators for as long as it is there, and NCCL waits for it to go.
  // Whether there is one is unknown here: then they stay for good.
  const Patience patience{Clock::now() + (was_captured_ ? kGraphTimeout : kCloseTimeout), give_up_};
  for (auto lane = lanes_.rbegin(); lane != lanes_.rend(); ++lane) {
    if ((*lane)->close(patience)) continue;
    was_captured_ ? (*lane)->forget() : (*lane)->abort();
  }
}

// False if the transport failed, before or here; it is aborted then. The watchdog sees to it that this ends.
bool NcclTransport::finish_transfers() {
  const Clock::time_point latest = Clock::now() + kCloseTimeout;
  std::unique_lock lock(state_mutex_);
  try {
    while (!failure_) {
      flights_.collect_done();
      if (!flights_.any_watched()) return true;
      if (call_->deadline == Clock::time_point::max() && Clock::now() >= latest) break;
      changed_.wait_for(lock, 1ms);
    }
  } catch (const Error&) {
    // The device is lost.
  }
  lock.unlock();
  fail({"the transport was closed with transfers under way", false});
  lock.lock();
  changed_.wait(lock, [&] { return is_aborted_; });
  return false;
}

void NcclTransport::begin(const std::string& call, std::span<const int>, std::chrono::milliseconds timeout) {
  throw_if_failed();
  auto fresh = std::make_shared<const NcclCall>(NcclCall{call, timeout, Clock::now() + timeout});
  const std::lock_guard lock(state_mutex_);
  call_ = std::move(fresh);
  num_started_ = 0;
}

template <class Group>
std::unique_ptr<Transfer> NcclTransport::launch(bool is_empty, StreamView stream, Group&& group) {
  throw_if_failed();
  try {
    const CudaDeviceGuard device(device_);
    const std::lock_guard nccl_lock(nccl_mutex_);
    if (give_up_) throw_failure("");
    // In turn, so that the first hop of a chunk and the second hop of the one before it do not queue behind each other.
    const std::size_t index = num_started_++ % lanes_.size();
    if (is_empty) return std::make_unique<NcclTransfer>(*this, nullptr);
    NcclLane& lane = *lanes_[index];
    const bool is_captured = is_capturing(stream);
    was_captured_ |= is_captured;
    Flight* flight = nullptr;
    {
      const std::lock_guard lock(state_mutex_);
      flight = &flights_.take(call_);
    }
    lane.follow(as_cuda(stream));
    group(lane, Patience{flight->call->deadline, give_up_});
    check_cuda(cudaEventRecord(flight->done, lane.stream()), "record an event");
    if (!is_captured) {
      const std::lock_guard lock(state_mutex_);
      const bool was_idle = !flights_.any_watched();
      flights_.watch(*flight, index);
      if (!watchdog_.joinable()) watchdog_ = std::thread([this] { watch(); });
      if (was_idle) changed_.notify_all();
    }
    return std::make_unique<NcclTransfer>(*this, flight);
  } catch (const Error& error) {
    const std::string peers = what_peers_say();
    fail({call_->in() + error.what() + (peers.empty() ? "" : " (" + peers + ")"),
          dynamic_cast<const TimeoutError*>(&error) != nullptr});
    throw_failure("");
  }
}

std::unique_ptr<Transfer> NcclTransport::start(std::span<const Send> sends, std::span<const Recv> recvs,
                                               StreamView stream) {
  const auto moves = [](const auto& message) { return message.num_bytes > 0; };
  const bool is_empty =
      std::none_of(sends.begin(), sends.end(), moves) && std::none_of(recvs.begin(), recvs.end(), moves);
  return launch(is_empty, stream,
                [&](NcclLane& lane, const Patience& patience) { lane.exchange(sends, recvs, patience); });
}

std::unique_ptr<Transfer> NcclTransport::all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) {
  return launch(size() == 1 || slot_bytes == 0, stream, [&](NcclLane& lane, const Patience& patience) {
    lane.all_gather(slots, slot_bytes, rank(), patience);
  });
}

void NcclTransport::wait(Flight& flight, StreamView stream) {
  throw_if_failed();
  const CudaDeviceGuard device(device_);
  check_cuda(cudaStreamWaitEvent(as_cuda(stream), flight.done, 0), "make a stream wait");
  const std::lock_guard lock(state_mutex_);
  flights_.mark_waited(flight);
}

void NcclTransport::give_up(const Flight& flight) noexcept {
  fail({flight.call->in() + "this rank stopped between the start of a transfer and its end", false});
  // Its memory may go as soon as this returns.
  const Clock::time_point latest = Clock::now() + kCloseTimeout;
  std::unique_lock lock(state_mutex_);
  changed_.wait_until(lock, latest, [&] { return is_aborted_; });
  try {
    while (flight.is_watched && Clock::now() < latest) {
      flights_.collect_done();
      changed_.wait_for(lock, 1ms);
    }
  } catch (const Error&) {
    // The device is lost; so is its memory.
  }
}

void NcclTransport::throw_failure(const char* prefix) const {
  if (failure_->is_timeout) throw TimeoutError(prefix + failure_->reason);
  throw TransportError(prefix + failure_->reason);
}

void NcclTransport::throw_if_failed() const {
  const std::lock_guard lock(state_mutex_);
  if (failure_) throw_failure("this transport failed before: ");
}

std::string NcclTransport::what_peers_say() const noexcept {
  try {
    return options_.peer_failure ? options_.peer_failure() : std::string();
  } catch (...) {
    return {};
  }
}

void NcclTransport::fail(Failure failure) noexcept {
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    give_up_ = true;
  }
  try {
    if (options_.on_failure) options_.on_failure(failure_->reason);
  } catch (...) {
    // It could not be told; the peers time out.
  }
  {
    // An abort while another thread is inside NCCL would pull the communicator away under it.
    const std::lock_guard nccl_lock(nccl_mutex_);
    for (const auto& lane : lanes_) lane->abort();
  }
  const std::lock_guard lock(state_mutex_);
  is_aborted_ = true;
  changed_.notify_all();
}

void NcclTransport::watch() {
  const RelaxedCapture relaxed;
  static_cast<void>(cudaSetDevice(device_));
  Clock::time_point next_question = Clock::now() + kPeerInterval;
  const auto is_over = [&] { return is_closing_ || failure_; };
  std::unique_lock lock(state_mutex_);
  while (!is_over()) {
    if (!flights_.any_watched()) {
      changed_.wait(lock, [&] { return is_over() || flights_.any_watched(); });
      continue;
    }
    changed_.wait_for(lock, kWatchInterval, is_over);
    std::optional<Failure> failure = look_at_transfers();
    lock.unlock();
    if (!failure) failure = look_at_communicators();
    const bool ask = failure || Clock::now() >= next_question;
    const std::string peers = ask ? what_peers_say() : std::string();
    if (ask) next_question = Clock::now() + kPeerInterval;
    lock.lock();
    if (!failure && peers.empty()) continue;
    if (!failure)
      failure = Failure{call_->in() + peers, false};
    else if (!peers.empty())
      failure->reason += " (" + peers + ")";
    lock.unlock();
    fail(*failure);
    return;
  }
}

// Under state_mutex_.
std::optional<Failure> NcclTransport::look_at_transfers() {
  try {
    flights_.collect_done();
  } catch (const Error& error) {
    return Failure{call_->in() + error.what(), false};
  }
  const Flight* flight = flights_.find_overdue(Clock::now());
  if (flight == nullptr) return {};
  return Failure{flight->call->in() + "not done within the timeout, " + std::to_string(flight->call->timeout.count()) +
                     " ms: a peer is stuck or gone, or called something else",
                 true};
}

std::optional<Failure> NcclTransport::look_at_communicators() {
  // Who is inside NCCL sees its errors.
  const std::unique_lock nccl_lock(nccl_mutex_, std::try_to_lock);
  if (!nccl_lock || give_up_) return {};
  try {
    for (const auto& lane : lanes_) lane->check_health();
  } catch (const TransportError& error) {
    const std::lock_guard lock(state_mutex_);
    return Failure{call_->in() + error.what(), false};
  }
  return {};
}

}  // namespace

NcclUniqueId make_nccl_unique_id() {
  const nccl::Symbols& symbols = nccl::library().symbols;
  nccl::UniqueId id;
  const nccl::Result result = symbols.GetUniqueId(&id);
  if (result != nccl::Result::success) {
    throw TransportError(std::string("NCCL could not name a group of ranks: ") + symbols.GetErrorString(result));
  }
  NcclUniqueId bytes;
  std::memcpy(bytes.data(), &id, bytes.size());
  return bytes;
}

std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options) {
  return std::make_unique<NcclTransport>(options);
}

}  // namespace zcomm
