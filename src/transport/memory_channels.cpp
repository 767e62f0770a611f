#include "memory_channels.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

constexpr std::size_t kArenaBytes = std::size_t{4} << 20;
constexpr std::size_t kPlaceBytes = 64;                      // places in the arena are multiples
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;  // so that a receiver copies while the sender does
// A shorter message is one piece, which may stay: a chunk of 16-bit values in int8 is one.
constexpr std::size_t kWholeBytes = std::size_t{640} << 10;
constexpr std::uint64_t kPlaces = 64;  // pieces under way to one receiver
constexpr int kYields = 50;            // before a rank sleeps
constexpr std::size_t kReasonChars = 492;

std::size_t piece_bytes(std::size_t left) { return left <= kWholeBytes ? left : kPieceBytes; }

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace

struct MemoryChannels::Piece {
  std::atomic<std::uint64_t> number;  // of those for its receiver, from 1, until it has taken the piece; then 0
  std::uint64_t offset;               // in the arena
  std::uint64_t left;                 // of the message, this piece included
  std::uint32_t num_bytes;
  std::uint32_t tag;
};

struct alignas(64) MemoryChannels::Outbox {
  std::atomic<std::uint32_t> doorbell;  // of the owner
  std::atomic<std::uint32_t> is_asleep;
  std::atomic<std::uint32_t> has_failed;  // once the reason is written
  std::atomic<std::uint32_t> is_failing;
  std::atomic<std::uint32_t> wants_room;  // set by the owner, who has something to send and no place for it
  char reason[kReasonChars];
  // The pieces for each receiver and the arena follow.
  Piece* lane(std::size_t receiver) { return reinterpret_cast<Piece*>(this + 1) + receiver * kPlaces; }
  std::byte* arena(std::size_t num_ranks) { return reinterpret_cast<std::byte*>(lane(num_ranks)); }
};

struct MemoryChannels::Outgoing {
  std::vector<int> peers;
  std::vector<std::uint32_t> tags;
  const std::byte* data;
  std::size_t left;
  Batch* batch;  // null once dropped
};

struct MemoryChannels::Incoming {
  int peer;
  std::byte* data;
  std::size_t room;  // what is still to come; of a message that has stayed, its bytes
  bool is_upper_bound;
  std::uint32_t tag;
  Batch* batch;             // null once dropped
  const std::byte** place;  // null if the message is to be copied
  Piece* kept = nullptr;    // where it has stayed
};

struct MemoryChannels::Block {
  std::size_t begin;
  std::size_t end;
  std::vector<std::pair<int, const Piece*>> readers;  // peers that have not taken it
};

std::size_t MemoryChannels::outbox_bytes(int num_ranks) {
  return sizeof(Outbox) + static_cast<std::size_t>(num_ranks) * kPlaces * sizeof(Piece) + kArenaBytes;
}

MemoryChannels::MemoryChannels(const std::vector<std::byte*>& outboxes, int own)
    : own_(own), incoming_(outboxes.size()), num_posted_(outboxes.size()), num_taken_(outboxes.size()) {
  // All fields of an outbox are 0 at first, as its memory is.
  for (std::byte* const outbox : outboxes) outboxes_.push_back(std::launder(reinterpret_cast<Outbox*>(outbox)));
}

MemoryChannels::~MemoryChannels() = default;

void MemoryChannels::send(std::span<const int> peers, const std::byte* data, std::size_t num_bytes,
                          std::span<const std::uint32_t> tags, Batch& batch) {
  outgoing_.push_back({{peers.begin(), peers.end()}, {tags.begin(), tags.end()}, data, num_bytes, &batch});
  batch += peers.size();
}

void MemoryChannels::recv(int peer, std::byte* data, std::size_t num_bytes, bool is_upper_bound, std::uint32_t tag,
                          Batch& batch, const std::byte** place) {
  incoming_[static_cast<std::size_t>(peer)].push_back({peer, data, num_bytes, is_upper_bound, tag, &batch, place});
  ++batch;
}

bool MemoryChannels::progress() {
  bool moved = false;
  for (bool again = true; again; moved |= again) {
    again = send_piece();
    for (int peer = 0; peer < static_cast<int>(outboxes_.size()); ++peer) again |= take_piece(peer);
  }
  return moved;
}

// Returns the lowest place for a piece in the arena, if the receivers have places for more pieces, too: so the pages in
// use are few, and stay in a cache. Forgets blocks that all receivers have taken.
std::optional<std::size_t> MemoryChannels::find_room(std::size_t num_bytes, const Outgoing& message) {
  for (Block& block : blocks_) {
    std::erase_if(block.readers, [](const auto& reader) { return reader.second->number.load() == 0; });
  }
  std::erase_if(blocks_, [](const Block& block) { return block.readers.empty(); });
  for (const int peer : message.peers) {
    if (next_piece(peer).number.load() != 0) return std::nullopt;
  }
  std::size_t place = 0;
  for (const Block& block : blocks_) {
    if (place + num_bytes <= block.begin) return place;
    place = block.end;
  }
  return place + num_bytes <= kArenaBytes ? std::optional(place) : std::nullopt;
}

MemoryChannels::Piece& MemoryChannels::next_piece(int peer) {
  const auto receiver = static_cast<std::size_t>(peer);
  return outboxes_[static_cast<std::size_t>(own_)]->lane(receiver)[num_posted_[receiver] % kPlaces];
}

// Copies the next piece into the arena, if there is room.
bool MemoryChannels::send_piece() {
  while (!outgoing_.empty() && outgoing_.front().batch == nullptr) outgoing_.pop_front();
  if (outgoing_.empty()) return false;
  Outgoing& message = outgoing_.front();
  const std::size_t num_bytes = piece_bytes(message.left);
  Outbox& outbox = *outboxes_[static_cast<std::size_t>(own_)];
  std::optional<std::size_t> place = find_room(num_bytes, message);
  if (!place) {
    const bool is_new = outbox.wants_room.exchange(1) == 0;  // before a second look: who takes something after it rings
    place = find_room(num_bytes, message);
    if (place && is_new) outbox.wants_room.store(0);  // else nobody would be rung the next time
    if (!place && is_new) ring_readers();
    if (!place) return false;
  }
  std::memcpy(outbox.arena(outboxes_.size()) + *place, message.data, num_bytes);
  Block block{*place, (*place + num_bytes + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes, {}};
  for (std::size_t i = 0; i < message.peers.size(); ++i) {
    const int peer = message.peers[i];
    Piece& piece = next_piece(peer);
    piece.offset = *place;
    piece.left = message.left;
    piece.num_bytes = static_cast<std::uint32_t>(num_bytes);
    piece.tag = message.tags[i];
    piece.number.store(++num_posted_[static_cast<std::size_t>(peer)], std::memory_order_release);
    block.readers.emplace_back(peer, &piece);
    ring(peer);
  }
  blocks_.insert(std::ranges::upper_bound(blocks_, block.begin, {}, &Block::begin), std::move(block));
  message.data += num_bytes;
  message.left -= num_bytes;
  if (message.left == 0) {
    *message.batch -= message.peers.size();
    outgoing_.pop_front();
  }
  return true;
}

MemoryChannels::Piece* MemoryChannels::posted_by(int peer) const {
  const std::uint64_t number = num_taken_[static_cast<std::size_t>(peer)];
  Piece& piece = outboxes_[static_cast<std::size_t>(peer)]->lane(static_cast<std::size_t>(own_))[number % kPlaces];
  return piece.number.load(std::memory_order_acquire) == number + 1 ? &piece : nullptr;
}

// Takes one, so that this rank sends meanwhile.
bool MemoryChannels::take_piece(int peer) {
  std::deque<Incoming>& messages = incoming_[static_cast<std::size_t>(peer)];
  Piece* const piece = messages.empty() ? nullptr : posted_by(peer);
  if (piece == nullptr) return false;
  Incoming& message = messages.front();
  if (piece->tag != message.tag || message.batch == nullptr) return false;
  // Copies, because the peer can write to them. What is checked is what is used.
  const std::uint64_t left = piece->left, offset = piece->offset;
  const std::size_t num_bytes = piece->num_bytes;
  if (left > message.room || (!message.is_upper_bound && left != message.room)) {
    throw TransportError(concat("a message of ", left, " bytes came where this rank expects ",
                                message.is_upper_bound ? "at most " : "", message.room));
  }
  if (num_bytes != piece_bytes(left) || offset > kArenaBytes || num_bytes > kArenaBytes - offset) {
    throw TransportError(concat("piece: expected ", piece_bytes(left), " bytes within the outbox of ", kArenaBytes,
                                ", got ", num_bytes, " at ", offset, ": the memory of the node is damaged"));
  }
  ++num_taken_[static_cast<std::size_t>(peer)];
  message.room = left - num_bytes;
  take(peer, *piece, {outboxes_[static_cast<std::size_t>(peer)]->arena(outboxes_.size()) + offset, num_bytes}, message);
  if (message.room == 0) {
    --*message.batch;
    messages.pop_front();
  }
  return true;
}

// Leaves a whole message where it is if its receiver can read it there and all ranks can have as much in an arena.
// Copies any other piece.
void MemoryChannels::take(int peer, Piece& piece, std::span<const std::byte> bytes, Incoming& message) {
  if (message.place != nullptr && message.room == 0 && bytes.size() * outboxes_.size() <= kArenaBytes) {
    *message.place = bytes.data();
    message.kept = &piece;
    kept_.push_back(message);
    kept_.back().room = bytes.size();
    return;
  }
  std::memcpy(message.data, bytes.data(), bytes.size());
  message.data += bytes.size();
  message.is_upper_bound = false;
  message.place = nullptr;
  free(peer, piece);
}

void MemoryChannels::free(int peer, Piece& piece) {
  piece.number.store(0);
  Outbox& outbox = *outboxes_[static_cast<std::size_t>(peer)];
  if (outbox.wants_room.load() != 0 && outbox.wants_room.exchange(0) != 0) ring(peer);
}

// Copies messages that stay where a peer wants room: else ranks could wait for one another.
bool MemoryChannels::give_room() {
  return std::erase_if(kept_, [this](const Incoming& message) {
           const Outbox& outbox = *outboxes_[static_cast<std::size_t>(message.peer)];
           if (outbox.wants_room.load() == 0) return false;
           std::memcpy(message.data, *message.place, message.room);
           *message.place = message.data;
           free(message.peer, *message.kept);
           return true;
         }) > 0;
}

// Wakes the peers that may keep what they could copy.
void MemoryChannels::ring_readers() {
  for (const Block& block : blocks_) {
    for (const auto& [peer, piece] : block.readers) ring(peer);
  }
}

void MemoryChannels::ring(int peer) {
  Outbox& outbox = *outboxes_[static_cast<std::size_t>(peer)];
  outbox.doorbell.fetch_add(1);
  if (outbox.is_asleep.load() != 0 && outbox.is_asleep.exchange(0) != 0)
    syscall(SYS_futex, &outbox.doorbell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Sleeps until a peer rings, unless one has since the doorbell was `seen`.
void MemoryChannels::sleep(std::uint32_t seen, std::chrono::milliseconds limit) {
  Outbox& outbox = *outboxes_[static_cast<std::size_t>(own_)];
  const timespec time{limit.count() / 1000, limit.count() % 1000 * 1'000'000};
  outbox.is_asleep.store(1);
  syscall(SYS_futex, &outbox.doorbell, FUTEX_WAIT, seen, &time, nullptr, 0);
  outbox.is_asleep.store(0);
}

bool MemoryChannels::wait(const Batch& batch, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::atomic<std::uint32_t>& doorbell = outboxes_[static_cast<std::size_t>(own_)]->doorbell;
  int yields = 0;
  while (batch > 0) {
    const std::uint32_t seen = doorbell.load();
    if (progress()) {
      yields = 0;
    } else if (++yields < kYields) {
      sched_yield();
    } else if (!give_room()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) return false;
      sleep(seen, left);
    }
    if (yields >= kYields && find_failed(batch) >= 0) return false;
  }
  return true;
}

std::vector<int> MemoryChannels::peers_of(const Batch& batch) const {
  std::vector<int> peers;
  for (std::size_t peer = 0; peer < incoming_.size(); ++peer) {
    const auto is_of_batch = [&](const Incoming& message) { return message.batch == &batch; };
    if (std::ranges::any_of(incoming_[peer], is_of_batch)) peers.push_back(static_cast<int>(peer));
  }
  const auto is_queued = [&](const Outgoing& message) { return message.batch == &batch; };
  if (std::ranges::none_of(outgoing_, is_queued)) return peers;
  for (const Block& block : blocks_) {
    for (const auto& [peer, piece] : block.readers) peers.push_back(peer);
  }
  for (const Outgoing& message : outgoing_) peers.insert(peers.end(), message.peers.begin(), message.peers.end());
  return peers;
}

bool MemoryChannels::differs(int peer) const {
  const std::deque<Incoming>& messages = incoming_[static_cast<std::size_t>(peer)];
  const Piece* const piece = messages.empty() ? nullptr : posted_by(peer);
  return piece != nullptr && piece->tag != messages.front().tag;
}

void MemoryChannels::drop(const Batch& batch) noexcept {
  std::erase_if(kept_, [&](const Incoming& message) {
    if (message.batch != &batch) return false;
    free(message.peer, *message.kept);
    return true;
  });
  if (batch == 0) return;
  for (Outgoing& message : outgoing_) {
    if (message.batch == &batch) message.batch = nullptr;
  }
  for (std::deque<Incoming>& messages : incoming_) {
    for (Incoming& message : messages) {
      if (message.batch == &batch) message.batch = nullptr;
    }
  }
}

void MemoryChannels::fail(const std::string& reason) noexcept {
  Outbox& outbox = *outboxes_[static_cast<std::size_t>(own_)];
  if (outbox.is_failing.exchange(1) != 0) return;
  std::memcpy(outbox.reason, reason.data(), std::min(reason.size(), kReasonChars - 1));
  outbox.has_failed.store(1, std::memory_order_release);
  for (int peer = 0; peer < static_cast<int>(outboxes_.size()); ++peer) ring(peer);
}

bool MemoryChannels::has_failed(int peer) const {
  return peer != own_ && outboxes_[static_cast<std::size_t>(peer)]->has_failed.load(std::memory_order_acquire) != 0;
}

int MemoryChannels::find_failed() const {
  for (int peer = 0; peer < static_cast<int>(outboxes_.size()); ++peer) {
    if (has_failed(peer)) return peer;
  }
  return -1;
}

int MemoryChannels::find_failed(const Batch& batch) const {
  for (const int peer : peers_of(batch)) {
    if (has_failed(peer)) return peer;
  }
  return -1;
}

std::string MemoryChannels::reason_of(int failed_peer) const {
  const char* const reason = outboxes_[static_cast<std::size_t>(failed_peer)]->reason;
  return {reason, strnlen(reason, kReasonChars)};
}

}  // namespace zcomm
