#include "zcomm/nccl.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "host/aside.hpp"
#include "transport/nccl_communicator.hpp"
#include "transport/nccl_flights.hpp"
#include "zcomm/cuda.hpp"

namespace zcomm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How often the watchdog looks at the transfers that are under way, and asks for what peers say.
constexpr auto kWatchInterval = 50ms;
constexpr auto kPeerInterval = 1s;
// How long a failure waits for what peers say, and for on_failure.
constexpr auto kAskTimeout = 1s;
constexpr auto kTellTimeout = 2s;
// How long a communicator without work may take to close, or an abort, and those that a graph may still need.
constexpr auto kCloseTimeout = 10s;
constexpr auto kGraphTimeout = 1s;

struct Failure {
  std::string reason;
  bool is_timeout = false;
};

// Messages that go out together, and their flight once they are under way.
struct Group {
  NcclMessages messages;
  int num_transfers = 0;
  Flight* flight = nullptr;
  bool is_captured = false;
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
  void begin_group() override;
  void end_group(StreamView stream) override;
  void abort(const std::string& reason) noexcept override { fail({reason, false}, /*ask=*/false); }

  void wait(Group& group, StreamView stream);
  void give_up(const Group& group) noexcept;

 private:
  void connect();
  std::vector<int> peers() const;
  // The open group, or one that goes out at once.
  std::shared_ptr<Group> join_group();
  std::unique_ptr<Transfer> add_transfer(std::shared_ptr<Group> group, StreamView stream);
  void launch(Group& group, StreamView stream);
  Flight& take_flight(const Group& group);
  void watch(Flight& flight);

  // The first failure counts: what is under way ends, peers are told.
  // False if there was one before.
  bool fail(Failure failure, bool ask) noexcept;
  [[noreturn]] void throw_failure(const char* prefix);
  void throw_if_failed();
  bool has_failed() const;
  void wait_for_abort() noexcept;
  std::shared_ptr<const NcclCall> call() const;
  std::string reason() const;

  void watch_all();
  std::optional<Failure> look_at_transfers();
  std::optional<Failure> look_at_communicator();
  std::optional<Failure> look_at_peers();
  bool finish_transfers() noexcept;
  void close() noexcept;

  const NcclOptions options_;
  int device_ = 0;
  // Shared with the thread that aborts it.
  std::shared_ptr<NcclCommunicator> communicator_;
  std::atomic<bool> was_captured_{false};
  std::atomic<bool> give_up_{false};  // makes those who poll NCCL leave it
  std::shared_ptr<Group> open_group_;

  // Held over queries of events, but over nothing that waits for the device or submits work.
  std::mutex flights_mutex_;
  NcclFlights flights_;

  // Held over no call of CUDA or NCCL. Of all below.
  mutable std::mutex state_mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const NcclCall> call_ = std::make_shared<NcclCall>();
  std::optional<Failure> failure_;  // never changes once is_told_
  bool is_told_ = false;
  std::shared_future<void> abort_;
  bool is_busy_ = false;  // flights may be watched
  bool is_closing_ = false;
  std::thread watchdog_;  // since the first transfer
  // The watchdog's.
  Clock::time_point next_question_{};
  std::future<std::string> answer_;
};

class NcclTransfer final : public Transfer {
 public:
  // A null group moves nothing.
  NcclTransfer(NcclTransport& transport, std::shared_ptr<Group> group)
      : transport_(transport), group_(std::move(group)) {}
  ~NcclTransfer() override {
    if (group_ != nullptr) transport_.give_up(*group_);
  }
  void wait(StreamView stream) override {
    if (group_ == nullptr) return;
    transport_.wait(*group_, stream);
    group_.reset();
  }

 private:
  NcclTransport& transport_;
  std::shared_ptr<Group> group_;
};

// Aborts on a thread of its own, as NCCL's abort waits for the device, and for graphs.
std::future<void> abort_aside(std::shared_ptr<NcclCommunicator> communicator, int device) {
  return run_aside([communicator = std::move(communicator), device]() mutable {
    static_cast<void>(cudaSetDevice(device));
    {
      // An abort while another thread is inside NCCL would pull the communicator away under it; that thread leaves
      // soon.
      const std::lock_guard lock(communicator->mutex());
      communicator->abort();
    }
    communicator.reset();
  });
}

NcclTransport::NcclTransport(const NcclOptions& options) : options_(options) {
  check_argument(options.rank >= 0 && options.rank < options.size, [&] {
    return "rank: got " + std::to_string(options.rank) + ", need 0 to " + std::to_string(options.size - 1);
  });
  check_cuda(cudaGetDevice(&device_), "tell the current device");
  communicator_ = std::make_shared<NcclCommunicator>(nccl::library().symbols);
  communicator_->check_not_capturing();
  try {
    connect();
  } catch (...) {
    static_cast<void>(abort_aside(communicator_, device_).wait_for(kCloseTimeout));
    throw;
  }
}

std::vector<int> NcclTransport::peers() const {
  if (!options_.peers.empty()) return options_.peers;
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  all.erase(all.begin() + rank());
  return all;
}

void NcclTransport::connect() {
  try {
    const std::lock_guard lock(communicator_->mutex());
    communicator_->connect(options_, peers(), {Clock::now() + options_.connect_timeout, give_up_});
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
  if (all_done) close();
}

void NcclTransport::close() noexcept {
  // A graph that captured transfers needs the communicator for as long as it is there, and NCCL waits for it to go.
  // Whether there is one is unknown here: then it stays for good.
  const Patience patience{Clock::now() + (was_captured_ ? kGraphTimeout : kCloseTimeout), give_up_};
  try {
    const CudaDeviceGuard device(device_);
    const std::lock_guard lock(communicator_->mutex());
    if (communicator_->close(patience)) return;
    if (was_captured_) return communicator_->forget();
  } catch (const Error&) {
    // The device is lost.
  }
  fail({"the transport did not close", false}, /*ask=*/false);
  wait_for_abort();
}

// False if the transport failed, before or here. The watchdog sees to it that this ends.
bool NcclTransport::finish_transfers() noexcept {
  const Clock::time_point latest = Clock::now() + kCloseTimeout;
  try {
    const CudaDeviceGuard device(device_);
    while (!has_failed()) {
      {
        const std::lock_guard lock(flights_mutex_);
        flights_.collect_done();
        if (!flights_.any_watched()) return true;
      }
      if (call()->deadline == Clock::time_point::max() && Clock::now() >= latest) break;
      std::this_thread::sleep_for(1ms);
    }
  } catch (const Error&) {
    // The device is lost.
  }
  fail({"the transport was closed with transfers under way", false}, /*ask=*/false);
  wait_for_abort();
  return false;
}

// Until NCCL has no memory of callers in use any more, as far as that can be told: with a graph that captured transfers
// the abort may never be over, but its work is soon.
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

void NcclTransport::begin(const std::string& text, std::span<const int>, std::chrono::milliseconds timeout) {
  throw_if_failed();
  open_group_.reset();
  auto fresh = std::make_shared<const NcclCall>(NcclCall{text, timeout, Clock::now() + timeout});
  const std::lock_guard lock(state_mutex_);
  call_ = std::move(fresh);
}

std::shared_ptr<const NcclCall> NcclTransport::call() const {
  const std::lock_guard lock(state_mutex_);
  return call_;
}

void NcclTransport::begin_group() { open_group_ = std::make_shared<Group>(); }

void NcclTransport::end_group(StreamView stream) {
  const std::shared_ptr<Group> group = std::exchange(open_group_, nullptr);
  if (group != nullptr && group->num_transfers > 0) launch(*group, stream);
}

std::shared_ptr<Group> NcclTransport::join_group() {
  throw_if_failed();
  return open_group_ != nullptr ? open_group_ : std::make_shared<Group>();
}

std::unique_ptr<Transfer> NcclTransport::add_transfer(std::shared_ptr<Group> group, StreamView stream) {
  ++group->num_transfers;
  if (group != open_group_) launch(*group, stream);
  return std::make_unique<NcclTransfer>(*this, std::move(group));
}

std::unique_ptr<Transfer> NcclTransport::start(std::span<const Send> sends, std::span<const Recv> recvs,
                                               StreamView stream) {
  const auto moves = [](const auto& message) { return message.num_bytes > 0; };
  std::shared_ptr<Group> group = join_group();
  const bool is_empty =
      std::none_of(sends.begin(), sends.end(), moves) && std::none_of(recvs.begin(), recvs.end(), moves);
  if (is_empty) return std::make_unique<NcclTransfer>(*this, nullptr);
  std::copy_if(sends.begin(), sends.end(), std::back_inserter(group->messages.sends), moves);
  std::copy_if(recvs.begin(), recvs.end(), std::back_inserter(group->messages.recvs), moves);
  return add_transfer(std::move(group), stream);
}

std::unique_ptr<Transfer> NcclTransport::all_gather(std::byte* slots, std::size_t slot_bytes, StreamView stream) {
  std::shared_ptr<Group> group = join_group();
  if (size() == 1 || slot_bytes == 0) return std::make_unique<NcclTransfer>(*this, nullptr);
  group->messages.gathers.push_back({slots, slot_bytes});
  return add_transfer(std::move(group), stream);
}

// CUDA blocks whoever submits work behind a launch queue that is full: no lock is held where it may.
void NcclTransport::launch(Group& group, StreamView stream) {
  throw_if_failed();
  try {
    const CudaDeviceGuard device(device_);
    group.is_captured = is_capturing(stream);
    if (group.is_captured) was_captured_ = true;
    Flight& flight = take_flight(group);
    communicator_->follow(as_cuda(stream));
    {
      const std::lock_guard lock(communicator_->mutex());
      if (give_up_) throw TransportError("gave up to start a transfer: the transport was aborted");
      communicator_->run(group.messages, {flight.call->deadline, give_up_});
    }
    check_cuda(cudaEventRecord(flight.done, communicator_->stream()), "record an event");
    group.flight = &flight;
    if (!group.is_captured) watch(flight);
  } catch (const Error& error) {
    fail({call()->in() + error.what(), dynamic_cast<const TimeoutError*>(&error) != nullptr}, /*ask=*/true);
    wait_for_abort();  // NCCL may have been about to launch what this thread no longer waits for
    throw_failure("");
  }
}

Flight& NcclTransport::take_flight(const Group& group) {
  Flight* flight = nullptr;
  {
    const std::lock_guard lock(flights_mutex_);
    flight = flights_.take();
  }
  if (flight == nullptr) {
    cudaEvent_t done = nullptr;
    check_cuda(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "create an event");
    const std::lock_guard lock(flights_mutex_);
    flight = &flights_.add(done);
  }
  flight->call = call();
  flight->num_waits = group.num_transfers;
  return *flight;
}

void NcclTransport::watch(Flight& flight) {
  {
    const std::lock_guard lock(flights_mutex_);
    flights_.watch(flight);
  }
  {
    const std::lock_guard lock(state_mutex_);
    if (!watchdog_.joinable()) watchdog_ = std::thread([this] { watch_all(); });
    if (std::exchange(is_busy_, true)) return;
  }
  changed_.notify_all();
}

void NcclTransport::wait(Group& group, StreamView stream) {
  throw_if_failed();
  if (group.flight == nullptr) throw TransportError("a transfer was waited for before its group was ended");
  const CudaDeviceGuard device(device_);
  check_cuda(cudaStreamWaitEvent(as_cuda(stream), group.flight->done, 0), "make a stream wait");
  const std::lock_guard lock(flights_mutex_);
  flights_.mark_waited(*group.flight);
}

void NcclTransport::give_up(const Group& group) noexcept {
  fail({call()->in() + "this rank stopped between the start of a transfer and its end", false}, /*ask=*/false);
  if (group.flight == nullptr || group.is_captured) return;
  // Its memory may go as soon as this returns.
  const Clock::time_point latest = Clock::now() + kCloseTimeout;
  try {
    for (; Clock::now() < latest; std::this_thread::sleep_for(1ms)) {
      const std::lock_guard lock(flights_mutex_);
      flights_.collect_done();
      if (!group.flight->is_watched) return;
    }
  } catch (const Error&) {
    // The device is lost; so is its memory.
  }
}

// Once it is complete.
void NcclTransport::throw_failure(const char* prefix) {
  std::unique_lock lock(state_mutex_);
  changed_.wait_for(lock, kAskTimeout + kTellTimeout, [&] { return is_told_; });
  if (failure_->is_timeout) throw TimeoutError(prefix + failure_->reason);
  throw TransportError(prefix + failure_->reason);
}

std::string NcclTransport::reason() const {
  const std::lock_guard lock(state_mutex_);
  return failure_->reason;
}

bool NcclTransport::has_failed() const {
  const std::lock_guard lock(state_mutex_);
  return failure_.has_value();
}

void NcclTransport::throw_if_failed() {
  if (has_failed()) throw_failure("this transport failed before: ");
}

// What is under way ends first; nothing that this rank says or hears may keep it from that.
bool NcclTransport::fail(Failure failure, bool ask) noexcept {
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_) return false;
    failure_ = failure;
    give_up_ = true;
    abort_ = abort_aside(communicator_, device_);
  }
  try {
    if (ask && options_.peer_failure) {
      auto answer = run_aside(options_.peer_failure);
      if (answer.wait_for(kAskTimeout) == std::future_status::ready) {
        if (const std::string peers = answer.get(); !peers.empty()) failure.reason += " (" + peers + ")";
      }
    }
  } catch (...) {
    // They could not be asked.
  }
  {
    const std::lock_guard lock(state_mutex_);
    failure_ = failure;
  }
  if (options_.on_failure) {
    static_cast<void>(run_aside([tell = options_.on_failure, reason = failure.reason] {
                        try {
                          tell(reason);
                        } catch (...) {
                          // They could not be told; they time out.
                        }
                      }).wait_for(kTellTimeout));
  }
  {
    const std::lock_guard lock(state_mutex_);
    is_told_ = true;
  }
  changed_.notify_all();
  return true;
}

void NcclTransport::watch_all() {
  const RelaxedCapture relaxed;
  static_cast<void>(cudaSetDevice(device_));
  next_question_ = Clock::now() + kPeerInterval;
  const auto is_over = [&] { return is_closing_ || failure_; };
  std::unique_lock lock(state_mutex_);
  while (!is_over()) {
    if (!is_busy_) {
      changed_.wait(lock, [&] { return is_over() || is_busy_; });
      continue;
    }
    changed_.wait_for(lock, kWatchInterval, is_over);
    is_busy_ = false;  // unless there is something, or comes meanwhile
    lock.unlock();
    std::optional<Failure> failure = look_at_transfers();
    if (!failure) failure = look_at_communicator();
    const bool ask = failure.has_value();
    if (!failure) failure = look_at_peers();
    if (failure) {
      if (fail(*failure, ask) && options_.on_undefined_bytes) options_.on_undefined_bytes(reason());
      return;
    }
    lock.lock();
  }
}

std::optional<Failure> NcclTransport::look_at_transfers() {
  const std::lock_guard lock(flights_mutex_);
  try {
    flights_.collect_done();
  } catch (const Error& error) {
    return Failure{call()->in() + error.what(), false};
  }
  if (flights_.any_watched()) {
    const std::lock_guard state_lock(state_mutex_);
    is_busy_ = true;
  }
  const Flight* flight = flights_.find_overdue(Clock::now());
  if (flight == nullptr) return {};
  return Failure{flight->call->in() + "not done within the timeout, " + std::to_string(flight->call->timeout.count()) +
                     " ms: a peer is stuck or gone, or called something else",
                 true};
}

std::optional<Failure> NcclTransport::look_at_communicator() {
  // Who is inside NCCL sees its errors. Two threads must never be, not even to ask how it is.
  const std::unique_lock lock(communicator_->mutex(), std::try_to_lock);
  if (!lock || give_up_) return {};
  try {
    communicator_->check_health();
  } catch (const TransportError& error) {
    return Failure{call()->in() + error.what(), false};
  }
  return {};
}

// Never waits for the answer.
std::optional<Failure> NcclTransport::look_at_peers() {
  if (!options_.peer_failure) return {};
  if (!answer_.valid() && Clock::now() >= next_question_) answer_ = run_aside(options_.peer_failure);
  if (!answer_.valid() || answer_.wait_for(0s) != std::future_status::ready) return {};
  next_question_ = Clock::now() + kPeerInterval;
  try {
    const std::string peers = answer_.get();
    if (!peers.empty()) return Failure{call()->in() + peers, false};
  } catch (...) {
    // They could not be asked.
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
