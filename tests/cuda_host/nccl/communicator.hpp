// A communicator of the NCCL on the host, as one rank holds it.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime.hpp"
#include "segment.hpp"
#include "transport/nccl_symbols.hpp"

namespace nccl_host {

using zcomm::nccl::Result;

struct Message {
  bool is_send = false;
  int kind = kSendRecv;  // both sides must agree
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  std::function<void()> after = {};  // runs when all messages of the group have moved
};

// Process-wide settings of nccl_host.hpp.
struct Settings {
  std::atomic<double> bytes_per_second{0};
  std::atomic<double> latency_seconds{0};
  std::atomic<int> launch_polls{2};
  std::atomic<int> group_cost_us{0};
  std::atomic<int> kernel_slots{4};  // of each device
  std::atomic<bool> keeps_error_queries{false};
  std::atomic<int> num_kept_error_queries{0};
  std::atomic<int> version{0};  // 0: what NCCL_HOST_VERSION says, or 22809
  std::atomic<bool> held[kMaxRanks]{};
};
Settings& settings();

// For ncclGetLastError().
void set_last_error(const std::string& text);
const char* last_error();
// Something that NCCL forbids was done.
void note_misuse(const std::string& text);

}  // namespace nccl_host

// Lives as long as the process: streams may refer to it long after it was aborted. What the workers of streams touch is
// relaxed, so that it orders nothing.
struct ncclComm {
  std::string name;  // of its segment
  int rank = 0;
  int size = 0;
  int device = 0;
  bool is_blocking = true;
  bool is_of_split = false;
  int num_channels = 0;                   // between it and each peer
  nccl_host::Segment* segment = nullptr;  // null until all ranks are there
  std::atomic<nccl_host::Result> async_error{nccl_host::Result::success};
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> is_running{false};  // a group of it
  // Of work that is queued, or recorded in graphs that are alive.
  std::atomic<int> num_leases{0};
  std::atomic<bool> is_closed{false};
  std::atomic<bool> is_detached{false};
  // Groups that were submitted, replays of graphs included, and those that are done: they run one after the other.
  std::atomic<std::uint64_t> num_submitted{0};
  std::atomic<std::uint64_t> num_done{0};

  // Below: host threads, one at a time, which `inside` checks.
  std::atomic<int> inside{0};
  std::atomic<bool> is_connecting{false};  // set back by `background`
  std::atomic<bool> is_launching{false};   // the same
  std::shared_future<void> background;
  // Before the last group gets onto its streams: of all communicators of that group.
  std::shared_ptr<std::atomic<int>> polls_left = std::make_shared<std::atomic<int>>(0);
  std::set<std::pair<int, bool>> connections;  // peer and whether it is for sends
  bool has_collectives[nccl_host::kKinds] = {};
  bool is_split = false;
  bool is_finalizing = false;
  bool is_finalized = false;

  // What NCCL does with a communicator once nothing uses it.
  void detach_if_unused();
};

namespace nccl_host {

// The release that is played.
int version();

// Keeps what the release reads of the configuration that a communicator is made with, or split into. False if NCCL
// refuses it.
bool accept(const zcomm::nccl::Config& config, bool is_of_split);

// Returns when what the last call does in the background is done.
void join(const ncclComm& communicator);

// Counted as alive until it is closed.
ncclComm& make_communicator(const std::string& name, int rank, int size, bool is_blocking, bool is_of_split);
void close(ncclComm& communicator);
// Tells whether a group runs on a device, of a communicator that is not aborted.
bool has_running(int device);

// Waits until all ranks have the segment. Runs in the background.
void meet(ncclComm& communicator, const std::atomic<bool>& is_aborted);

// Makes the communicator of this rank's color, once all ranks have said theirs. NCCL writes `made` when it is ready, or
// was interrupted, and crashes where an interrupted rank has no color. Runs in the background.
void split(ncclComm& parent, int color, ncclComm*& made, bool is_blocking);

// Keeps a communicator's memory for work that is queued.
class Lease {
 public:
  explicit Lease(ncclComm& communicator) : communicator_(communicator) {
    communicator_.num_leases.fetch_add(1, std::memory_order_relaxed);
  }
  ~Lease() {
    communicator_.num_leases.fetch_sub(1, std::memory_order_relaxed);
    communicator_.detach_if_unused();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  ncclComm& communicator_;
};

// Makes the connections that `messages` need and that are not there: returns when each peer has come to make them, too,
// or the communicator is aborted. True if there were any.
bool connect_peers(ncclComm& communicator, const std::vector<Message>& messages);

// Adds a message to this thread's group, or makes a group of it.
Result add(ncclComm* communicator, cudaStream_t stream, const Message& message, const char* function);

// Moves all messages, side by side, those between the same two ranks in order. Returns when they are done or the
// communicator is aborted, which leaves a pattern where bytes were to arrive. Runs on the thread of a stream, once the
// groups that were submitted before, `number` of them, are done, and one of the device's places for NCCL's kernels is
// free.
void exchange(ncclComm& communicator, std::uint64_t number, const std::vector<Message>& messages);

}  // namespace nccl_host

// NCCL's functions. Their types are zcomm's declarations.
using nccl_host::Result;
using zcomm::NcclUniqueId;
using zcomm::nccl::Comm;
using zcomm::nccl::Config;
using zcomm::nccl::Stream;
#define ZCOMM_DECLARE(name, result, parameters) extern "C" result nccl##name parameters;
ZCOMM_NCCL_FUNCTIONS(ZCOMM_DECLARE)
#undef ZCOMM_DECLARE
extern "C" Result ncclCommInitRank(Comm* made, int size, NcclUniqueId id, int rank);
