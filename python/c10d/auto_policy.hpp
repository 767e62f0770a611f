// policy="auto": whether calls of a class gain by compression. The first call of a class decides for all later ones, by
// the calibration of the options, or by a rehearsal: the group makes calls of that size on scratch, both ways, and
// times them until they are done, on a GPU by waiting for the caller's stream. What counts is the slowest rank of each
// call, by an all-reduce, so that all ranks have the same numbers, and decide alike at the same call.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "contest.hpp"
#include "inner_groups.hpp"
#include "options.hpp"

namespace zcomm::c10d_binding {

class CompressedCalls;
struct CallSettings;

class AutoPolicy {
 public:
  // What is decided at once, in one group.
  struct CallClass {
    Collective collective;
    DType dtype;
    int log2_bytes;      // of the gathered, scattered or reduced tensor, rounded down
    HopFormats formats;  // both the same, of an all-gather
    bool on_host;
    bool again;  // all_gather: of two calls, the second of which secondary shards serve

    friend bool operator==(const CallClass&, const CallClass&) = default;
  };
  struct Decision {
    CallClass kind;
    Round times;
    int rounds;  // that were counted; 0: by the calibration
  };

  // All outlive this. Of a group of `size` ranks.
  AutoPolicy(CompressedCalls& calls, InnerGroups& inner, const PythonHooks& hooks, int rank, int size,
             c10::intrusive_ptr<ZcommOptions> options)
      : calls_(calls), inner_(inner), hooks_(hooks), rank_(rank), size_(size), options_(std::move(options)) {}

  // Of a call that `policy` would compress; all ranks ask in the same order. Blocks until all have come, the first time
  // that a class is asked for. Throws Error if ranks come with different calls, and of a rehearsal on a GPU that a
  // graph would capture, or that is asked for while calls are coalesced.
  bool gains(const Policy& policy, const Call& call);
  // Of an all-gather that gains(): it is faster in one hop than in two, by as much. The bits are the same.
  bool is_one_hop(const Policy& policy, const Call& call) const;

  // In the order in which they were made.
  std::vector<Decision> decisions() const;

 private:
  struct Ways {
    std::function<WorkPtr()> exact;
    std::function<WorkPtr()> compressed;
    std::function<WorkPtr()> one_hop = {};  // empty: it is not another way
  };

  static CallClass class_of(const Policy& policy, const Call& call);
  std::optional<Round> known(const CallClass& kind) const;
  Decision predict(const CallClass& kind, const Call& call);
  Decision rehearse(const CallClass& kind, const Policy& policy, const Call& call);
  Ways ways(const Policy& policy, const Call& call);
  Ways gathers(const at::Tensor& whole, const CallSettings& settings, const Call& call, ::c10d::Backend& inner);
  std::int64_t time(const std::function<WorkPtr()>& start, const Call& call);
  std::vector<std::int64_t> largest(std::vector<std::int64_t> numbers);
  bool may_take_one_hop(const Call& call) const;
  void check_can_rehearse(const Call& call) const;
  void check_same_call(const CallClass& kind, const Call& call);

  CompressedCalls& calls_;
  InnerGroups& inner_;
  const PythonHooks& hooks_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<ZcommOptions> options_;
  mutable std::mutex mutex_;  // of the decisions; not held while one is made
  std::vector<Decision> decisions_;
};

}  // namespace zcomm::c10d_binding
