#include "nccl_rendezvous.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "c10d/job/flight_recorder.hpp"
#include "host/detached.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"

namespace zcomm::c10d_binding {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kNcclFailureKey = "failure";
constexpr std::chrono::seconds kBeat{1};
constexpr int kMaxMissedBeats = 10;

// Beats of the ranks that connect, in the store. Each rank counts those of the next one: a rank that is killed leaves
// no reason, and NCCL does not notice. Counts instead of times allow for a store that halts.
class Pulse {
 public:
  Pulse(StorePtr store, int rank, int size) : store_(std::move(store)), rank_(rank), next_((rank + 1) % size) {}

  // Beats on a thread of its own until `pulse` ends or is gone: NCCL may keep the rank's thread for longer.
  static void start(const std::shared_ptr<Pulse>& pulse) {
    run_detached([weak = std::weak_ptr(pulse)] {
      for (int number = 1;; ++number) {
        if (const std::shared_ptr<Pulse> living = weak.lock(); living == nullptr || !living->beat(number)) return;
        std::this_thread::sleep_for(kBeat);
      }
    });
  }
  void end() { is_over_ = true; }

  // Called more often than there are beats. Returns what is wrong, or an empty string. Thread-safe.
  std::string look() {
    const std::lock_guard lock(mutex_);
    if (is_over_ || Clock::now() < next_look_) return {};
    next_look_ = Clock::now() + kBeat;
    const std::string seen = text_in(*store_, key(next_)).value_or("");
    num_missed_ = seen == seen_ ? num_missed_ + 1 : 0;
    seen_ = seen;
    if (seen == kConnected || num_missed_ < kMaxMissedBeats) return {};
    return "rank " + std::to_string(next_) + " is gone: it has not connected, and has missed " +
           std::to_string(num_missed_) + " heartbeats";
  }

 private:
  static constexpr const char* kConnected = "connected";
  static std::string key(int rank) { return "beat of rank " + std::to_string(rank); }

  // Returns whether more beats are to come.
  bool beat(int number) {
    const bool is_over = is_over_;
    try {
      store_->set(key(rank_), is_over ? kConnected : std::to_string(number));
    } catch (const std::exception&) {
      return true;  // the store did not answer; it may take the next one
    }
    return !is_over;
  }

  const StorePtr store_;
  const int rank_;
  const int next_;
  std::atomic<bool> is_over_ = false;
  std::mutex mutex_;  // guards all below
  Clock::time_point next_look_{};
  std::string seen_;  // of the next rank
  int num_missed_ = 0;
};

// Ends the process: after a failure streams go on with undefined bytes, and results look like any others.
void end_process(const std::string& reason) {
  std::fprintf(stderr,
               "zcomm: %s\nCalls that have returned left undefined results on the GPU: this process ends. With "
               "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 the next call raises instead.\n",
               reason.c_str());
  std::fflush(stderr);
  std::abort();
}

// Ends the process: whoever needs the same lock inside CUDA would wait for good.
void end_stuck_process(const std::string& reason) {
  std::fprintf(stderr,
               "zcomm: %s. This process ends. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC sets the limit in seconds, and "
               "TORCH_NCCL_ENABLE_MONITORING=0 turns it off.\n",
               reason.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace

std::unique_ptr<Transport> connect_nccl(const ::c10d::Backend& group, const PythonHooks& hooks,
                                        const ZcommOptions& group_options, const Topology& topology,
                                        const std::shared_ptr<GroupErrors>& errors) {
  const auto [unique_id, store] = call_python(hooks.meet_for_nccl);
  NcclOptions options;
  std::memcpy(options.unique_id.data(), unique_id.data(), std::min(unique_id.size(), options.unique_id.size()));
  options.rank = group.getRank();
  options.size = group.getSize();
  // Connects all pairs for exchanges: over one hop, a pair that is not connected would connect in the middle of a call.
  const bool has_exchanges = std::ranges::any_of(kCollectives, [&](Collective collective) {
    return is_exchange(collective) && !group_options.policy.formats_of(collective).is_exact();
  });
  options.peers = has_exchanges ? topology.others(options.rank) : topology.peers(options.rank);
  for (int rank = 0; rank < options.size; ++rank) options.node_ids.push_back(topology.node(rank));
  options.connect_timeout = group_options.timeout;
  // Callbacks outlive this call, and the transport if the store hangs, so they own copies.
  options.on_failure = [errors, store = store, rank = options.rank](const std::string& reason) {
    errors->set_failure(errors->record(TransportError(reason)));
    FlightRecorder::of_process().write_on_failure();
    store->compareSet(kNcclFailureKey, "", first_cause("rank " + std::to_string(rank) + " gave up: " + reason));
    errors->announce();
  };
  if (ends_on_failure()) options.on_undefined_bytes = end_process;
  options.heartbeat = heartbeat_limit();
  options.on_stuck = [rank = options.rank](const std::string& reason) {
    end_stuck_process("rank " + std::to_string(rank) + ", " + reason);
  };
  const auto pulse = std::make_shared<Pulse>(store, options.rank, options.size);
  Pulse::start(pulse);
  options.interruption = [errors] { return errors->is_aborted() ? kAborted : ""; };
  options.peer_failure = [store = store, pulse] {
    const std::optional<std::string> reason = text_in(*store, kNcclFailureKey);
    return reason ? *reason : pulse->look();
  };
  auto transport = make_nccl_transport(options);
  pulse->end();
  return transport;
}

}  // namespace zcomm::c10d_binding
