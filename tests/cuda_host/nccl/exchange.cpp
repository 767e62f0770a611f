#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "communicator.hpp"

namespace nccl_host {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t header_of(const Message& message) {
  return message.num_bytes | static_cast<std::uint64_t>(message.kind) << 56;
}

// Whole words at once and with a constant size: the compiler expands other copies of a few bytes in place, without
// telling ThreadSanitizer, which moreover forgets most of what touches memory byte by byte.
std::uint64_t load_word(const std::byte* data, std::size_t num_bytes) {
  std::uint64_t word = 0;
  if (num_bytes == sizeof(word)) {
    std::memcpy(&word, data, sizeof(word));
  } else {
    for (std::size_t i = 0; i < num_bytes; ++i) word |= static_cast<std::uint64_t>(data[i]) << (8 * i);
  }
  return word;
}

void store_word(std::byte* data, std::size_t num_bytes, std::uint64_t word) {
  if (num_bytes == sizeof(word)) {
    std::memcpy(data, &word, sizeof(word));
  } else {
    for (std::size_t i = 0; i < num_bytes; ++i) data[i] = static_cast<std::byte>(word >> (8 * i));
  }
}

// The messages in one direction between two ranks, in order.
class Channel {
 public:
  Channel(ncclComm& communicator, int from, int to, bool is_sending)
      : communicator_(communicator),
        ring_(communicator.segment->rings[from][to]),
        from_(from),
        to_(to),
        is_sending_(is_sending) {}

  void add(const Message& message) { messages_.push_back(&message); }

  // True if anything moved.
  bool send_some();
  bool receive_some();
  // What memory that an abort kept from being filled holds: anything.
  void spoil() {
    for (; current_ < messages_.size(); next()) std::memset(current().data, 0xa5, current().num_bytes);
  }
  // All sent and read by the other side, or all received.
  bool is_done() const {
    return current_ == messages_.size() &&
           (!is_sending_ || ring_.read.load(std::memory_order_relaxed) == last_written_);
  }

 private:
  const Message& current() const { return *messages_[current_]; }
  std::uint64_t words_left() const { return (current().num_bytes - num_bytes_ + 7) / 8; }
  std::uint64_t words_allowed();
  void next() {
    ++current_;
    num_bytes_ = 0;
    has_header_ = false;
  }

  ncclComm& communicator_;
  Ring& ring_;
  int from_;
  int to_;
  bool is_sending_;  // a rank may send to itself
  std::vector<const Message*> messages_;
  std::size_t current_ = 0;
  bool has_header_ = false;
  std::size_t num_bytes_ = 0;  // of the current message so far
  std::uint64_t last_written_ = ring_.written.load(std::memory_order_relaxed);
  Clock::time_point start_ = Clock::now();
};

// How much of the current message a slow link lets through by now.
std::uint64_t Channel::words_allowed() {
  const double rate = settings().bytes_per_second;
  if (rate <= 0) return words_left();
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count() - settings().latency_seconds;
  const double bytes = std::max(0.0, seconds * rate) - static_cast<double>(num_bytes_);
  return bytes < 8 ? 0 : std::min(words_left(), static_cast<std::uint64_t>(bytes / 8) + 1);
}

bool Channel::send_some() {
  if (current_ == messages_.size()) return false;
  std::uint64_t written = last_written_;
  std::uint64_t space = kRingWords - (written - ring_.read.load(std::memory_order_relaxed));
  if (space == 0) return false;
  if (!has_header_) {
    ring_.words[written++ % kRingWords].store(header_of(current()), std::memory_order_relaxed);
    has_header_ = true;
    start_ = Clock::now();
    --space;
  }
  for (std::uint64_t words = std::min(space, words_allowed()); words > 0; --words) {
    const std::size_t num_bytes = std::min<std::size_t>(8, current().num_bytes - num_bytes_);
    const std::uint64_t word = load_word(current().data + num_bytes_, num_bytes);
    ring_.words[written++ % kRingWords].store(word, std::memory_order_relaxed);
    num_bytes_ += num_bytes;
  }
  if (words_left() == 0) next();
  if (written == last_written_) return false;
  last_written_ = written;
  ring_.written.store(written, std::memory_order_release);
  communicator_.segment->ring(to_);
  return true;
}

bool Channel::receive_some() {
  if (current_ == messages_.size()) return false;
  const std::uint64_t begin = ring_.read.load(std::memory_order_relaxed);
  std::uint64_t read = begin;
  std::uint64_t available = ring_.written.load(std::memory_order_acquire) - read;
  if (available == 0) return false;
  if (!has_header_) {
    const std::uint64_t header = ring_.words[read % kRingWords].load(std::memory_order_relaxed);
    if (header != header_of(current())) {
      set_last_error("rank " + std::to_string(to_) + " expects " + std::to_string(current().num_bytes) +
                     " bytes where rank " + std::to_string(from_) + " sends " +
                     std::to_string(header & ((std::uint64_t{1} << 56) - 1)));
      communicator_.async_error = Result::invalid_usage;
      return false;  // until somebody aborts
    }
    ++read;
    --available;
    has_header_ = true;
  }
  for (std::uint64_t words = std::min(available, words_left()); words > 0; --words) {
    const std::size_t num_bytes = std::min<std::size_t>(8, current().num_bytes - num_bytes_);
    const std::uint64_t word = ring_.words[read++ % kRingWords].load(std::memory_order_relaxed);
    store_word(current().data + num_bytes_, num_bytes, word);
    num_bytes_ += num_bytes;
  }
  if (words_left() == 0) next();
  ring_.read.store(read, std::memory_order_release);
  communicator_.segment->ring(from_);
  return true;
}

// One of the places for NCCL's kernels on a device. Relaxed: places order no memory.
class Place {
 public:
  explicit Place(ncclComm& communicator) : num_taken_(taken_on(communicator.device)) {
    thread_local std::minstd_rand random(
        static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
    const auto pause = [&] { cuda_host::nap(std::chrono::microseconds(random() % 200)); };
    if (settings().kernel_slots < 4) pause();  // so that who is first is left to chance
    for (int taken = num_taken_.load(std::memory_order_relaxed); !has_it_;) {
      if (communicator.is_aborted.load(std::memory_order_relaxed)) return;
      if (taken >= settings().kernel_slots.load(std::memory_order_relaxed)) {
        pause();
        taken = num_taken_.load(std::memory_order_relaxed);
      } else {
        has_it_ = num_taken_.compare_exchange_weak(taken, taken + 1, std::memory_order_relaxed);
      }
    }
  }
  ~Place() {
    if (has_it_) num_taken_.fetch_sub(1, std::memory_order_relaxed);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

 private:
  static std::atomic<int>& taken_on(int device) {
    static std::atomic<int> taken[64];
    return taken[device];
  }

  std::atomic<int>& num_taken_;
  bool has_it_ = false;
};

// The turn of a group among those of its communicator, whatever streams they are on. Relaxed, as above.
class Turn {
 public:
  Turn(ncclComm& communicator, std::uint64_t number) : communicator_(communicator) {
    while (communicator.num_done.load(std::memory_order_relaxed) != number &&
           !communicator.is_aborted.load(std::memory_order_relaxed)) {
      cuda_host::nap(std::chrono::microseconds(20));
    }
  }
  ~Turn() { communicator_.num_done.fetch_add(1, std::memory_order_relaxed); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  ncclComm& communicator_;
};

}  // namespace

void exchange(ncclComm& communicator, std::uint64_t number, const std::vector<Message>& messages) {
  const auto is_aborted = [&] { return communicator.is_aborted.load(std::memory_order_relaxed); };
  const Turn turn(communicator, number);
  const Place place(communicator);
  while (settings().held[communicator.rank].load(std::memory_order_relaxed) && !is_aborted()) {
    cuda_host::nap(std::chrono::milliseconds(1));
  }
  std::vector<Channel> sends;
  std::vector<Channel> recvs;
  for (int peer = 0; peer < communicator.size; ++peer) {
    sends.emplace_back(communicator, communicator.rank, peer, true);
    recvs.emplace_back(communicator, peer, communicator.rank, false);
  }
  for (const Message& message : messages) {
    (message.is_send ? sends : recvs)[static_cast<std::size_t>(message.peer)].add(message);
  }
  const auto all_done = [](const std::vector<Channel>& channels) {
    return std::all_of(channels.begin(), channels.end(), [](const Channel& channel) { return channel.is_done(); });
  };
  communicator.is_running.store(true, std::memory_order_relaxed);
  auto& doorbell = communicator.segment->doorbells[communicator.rank];
  while (!is_aborted()) {
    const std::uint32_t seen = doorbell.load(std::memory_order_relaxed);
    bool moved = false;
    for (Channel& channel : sends) moved |= channel.send_some();
    for (Channel& channel : recvs) moved |= channel.receive_some();
    if (moved) continue;
    if (all_done(sends) && all_done(recvs)) break;
    communicator.segment->sleep(communicator.rank, seen);
  }
  communicator.is_running.store(false, std::memory_order_relaxed);
  if (!is_aborted() || (all_done(sends) && all_done(recvs))) {
    for (const Message& message : messages) {
      if (message.after) message.after();
    }
    return;
  }
  for (Channel& channel : recvs) channel.spoil();
}

}  // namespace nccl_host
