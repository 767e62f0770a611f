// Communicators of the program, each with a zcomm communicator that runs its compressed calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "front/messages.hpp"
#include "front/settings.hpp"
#include "front/tally.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::front {

// One thread at a time calls it, as NCCL demands for a communicator, except for abort(), is_aborted() and has_failed().
class Parent {
 public:
  // `comm` may still be connecting.
  Parent(nccl::Comm comm, std::string name) : comm_(comm), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  // Returns a text that is the same on all ranks, once they have met.
  const std::string& identity() const { return identity_; }
  bool has_met() const { return state_ != State::fresh; }

  // Returns the formats that a call asks for, by itself, by a rule or by a variable. Throws ArgumentError for wrong
  // ones.
  HopFormats formats_of(const Request& request, const nccl::CollConfig* config);

  // Tells whether a call is to be compressed, and why not. All ranks get the same answer. Before the ranks have met it
  // may be `compressed` for a call that stays exact later. Throws Error if CUDA does.
  Reason decide(const Request& request);
  void count(const Request& request, Reason reason) { tally_.add(request, reason); }

  // Meets the other ranks, which must do the same. Blocks until all have come. If one of them cannot connect, all
  // calls stay exact on all of them, and one line on stderr says why. Throws Error where `comm` itself fails.
  // `all_pairs`: connects any two ranks, as exchanges need. So it does if the environment asks for exchanges.
  void meet(bool all_pairs);

  // Lets the ranks of a new communicator tell each other their nodes, which messages need, and compare their settings.
  // Blocks until all ranks have come. Throws Error if they differ, or where `comm` itself fails.
  void locate();

  // Takes the wire of a message that decide() compresses, and counts its bytes.
  Message take_message(const Request& request);
  Messages& messages() { return messages_; }

  // Queues a collective that decide() compresses on its stream. Throws what Communicator::run() throws.
  void run(const Request& request);

  // Waits until the real library has put what the program has called on its streams. After leave() it is an error.
  nccl::Result settle();
  // The program ends its communicator, which nothing asks afterwards.
  void leave();

  // Makes the call in progress and all later ones throw.
  void abort() noexcept;
  bool is_aborted() const { return fate_->is_aborted; }
  bool has_failed() const { return fate_->has_failed; }

  // Waits for compressed calls, unless they were aborted, and ends zcomm's communicator.
  void close() noexcept;
  // Writes the counts as ZCOMM_LOG and ZCOMM_STATS want them.
  void report() const;

 private:
  enum class State { fresh, met, one_node, refused };
  // Shared with threads that may outlive this object.
  struct Fate {
    std::atomic<bool> is_in_use{false};  // the ranks have met
    std::atomic<bool> is_aborted{false};
    std::atomic<bool> has_failed{false};
  };
  using Key = std::tuple<Collective, std::size_t, unsigned, int, HopFormats>;  // count, type, root
  struct Prepared {
    OperationPtr operation;          // null: the formats do not take the shape
    std::set<nccl::Stream> streams;  // on which it ran outside captures
  };

  struct Views {
    std::vector<ConstTensorView> inputs;
    std::vector<TensorView> outputs;
  };

  std::size_t bytes_of(const Request& request) const;
  Views views_of(const Request& request) const;
  Reason decide_met(const Request& request);
  void ask_size();
  NcclBootstrap exchange(std::uint64_t token, bool makes_id);
  Prepared& prepare(const Request& request);
  OperationPtr make_operation(const Request& request) const;
  std::string connect(const NcclUniqueId& unique_id, const Topology& topology);
  std::shared_ptr<Communicator> communicator() const;
  std::string where() const;

  const nccl::Comm comm_;
  const std::string name_;
  const std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  int rank_ = 0;
  int size_ = 0;  // 0: not asked yet
  int device_ = 0;
  int num_nodes_ = 0;  // 0: not known
  std::optional<World> world_;
  State state_ = State::fresh;
  bool has_all_pairs_ = false;
  std::string identity_;
  std::map<Key, Prepared> prepared_;
  mutable std::mutex mutex_;  // guards the pointer against abort()
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<void>> kept_;  // until the end: freeing it waits for work that may wait for a peer
  std::mutex poll_mutex_;                    // guards the next one, and the communicator while it is asked
  bool has_left_ = false;
  Messages messages_;
  Tally tally_;
};

}  // namespace zcomm::front
