// Messages between ranks of one host through memory that they share. A sender copies a message into its outbox once,
// for all its receivers; each receiver copies it out, or reads it where it is.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zcomm {

// Channels between the ranks of a node. Used by one thread at a time, but for fail(). Peers are local ranks.
//
// An outbox is written by its rank alone, but for the marks of what its peers have taken. Marks are stored after the
// bytes that they tell of are written or read, and loaded before. A rank sleeps on its doorbell, a futex that peers
// change after they have moved something for it.
class [[gnu::visibility("default")]] MemoryChannels {
 public:
  // Number of a transfer's messages that have not been moved, those to several receivers once for each. It is their
  // batch: it has its place until all are moved, or it is dropped.
  using Batch = std::size_t;

  // Returns the bytes of each outbox in a node of `num_ranks`.
  static std::size_t outbox_bytes(int num_ranks);

  // Borrows the outboxes of all ranks by local rank, in memory that was zero before the first of them began.
  MemoryChannels(const std::vector<std::byte*>& outboxes, int own);
  ~MemoryChannels();

  // Queues messages. Those between two ranks match in order, if their `tag` is equal; others wait forever. The memory
  // of a message is in use until it has been moved or its batch is dropped. A message with a `place` may stay in the
  // outbox, where that then points, until its batch is dropped: but wait() may copy it to `data` after all.
  void send(std::span<const int> peers, const std::byte* data, std::size_t num_bytes,
            std::span<const std::uint32_t> tags, Batch& batch);
  void recv(int peer, std::byte* data, std::size_t num_bytes, bool is_upper_bound, std::uint32_t tag, Batch& batch,
            const std::byte** place = nullptr);

  // Moves what can be moved, of all batches. Returns false if there was nothing. Throws TransportError if a message is
  // longer than its limit, or its fields are not those of a message.
  bool progress();
  // Calls progress() until `batch` is done, `limit` is over or one of its peers has failed; sleeps while there is
  // nothing to move. Returns whether it is done.
  bool wait(const Batch& batch, std::chrono::milliseconds limit);
  // Returns the peers without whom the batch is not done: those that it receives from and, while something is queued,
  // all that have not taken what fills the outbox.
  std::vector<int> peers_of(const Batch& batch) const;
  // Tells whether the next message of a peer has another tag than the one that is expected: it will never match.
  bool differs(int peer) const;
  // Forgets the messages of a batch. Peers of those that have not been moved wait until fail().
  void drop(const Batch& batch) noexcept;

  // Tells the peers why this rank will move nothing more. Thread-safe.
  void fail(const std::string& reason) noexcept;
  // Returns a peer that has told so, or -1: any peer, or one of peers_of(batch).
  int find_failed() const;
  int find_failed(const Batch& batch) const;
  std::string reason_of(int failed_peer) const;

 private:
  struct Outbox;
  struct Outgoing;
  struct Incoming;
  struct Block;
  struct Piece;

  bool has_failed(int peer) const;
  bool send_piece();
  Piece& next_piece(int peer);
  bool take_piece(int peer);
  Piece* posted_by(int peer) const;  // the next piece; null if there is none
  std::optional<std::size_t> find_room(std::size_t num_bytes, const Outgoing& message);
  void take(int peer, Piece& piece, std::span<const std::byte> bytes, Incoming& message);
  void free(int peer, Piece& piece);
  bool give_room();
  void ring_readers();
  void ring(int peer);
  void sleep(std::uint32_t seen, std::chrono::milliseconds limit);

  std::vector<Outbox*> outboxes_;
  const int own_;
  std::deque<Outgoing> outgoing_;
  std::vector<std::deque<Incoming>> incoming_;  // by peer
  std::vector<std::uint64_t> num_posted_;       // pieces, by peer, like the next ones
  std::vector<std::uint64_t> num_taken_;
  std::vector<Incoming> kept_;  // messages that have stayed where they were
  std::vector<Block> blocks_;   // used parts of this rank's arena, by offset
};

}  // namespace zcomm
