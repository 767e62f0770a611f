// compress="auto": decides per class of calls whether compression pays. The first call of a class decides for all later
// ones, by the table of the option "decisions" or by a rehearsal. A rehearsal makes calls of that size on scratch
// tensors, both ways, and times them until they are done; on a GPU it waits for the caller's stream. Once training
// steps are known, their times decide instead of rehearsals: StepChoice. An all-reduce takes the slowest rank of each
// time, so that all ranks decide alike.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "c10d/policy/step_choice.hpp"
#include "inner_groups.hpp"
#include "options.hpp"

namespace zcomm::c10d_binding {

class CompressedCalls;
struct Request;

class AutoPolicy {
 public:
  // Decision about a class of calls in one group.
  struct Decision {
    static constexpr std::string_view kTable = "table", kCalls = "calls", kSteps = "steps";
    Collective collective;
    DType dtype;
    int log2_bytes;      // of the gathered, scattered or reduced tensor, rounded down
    HopFormats formats;  // twice the same for an all-gather
    bool on_host;
    bool again;  // all_gather: of two calls, the second one from secondary shards

    std::string_view by = {};  // kTable, kCalls or kSteps
    Round times = {};          // none if the class was new when steps were known
    int rounds = 0;            // of a rehearsal, counted ones
    bool compressed = false;   // from now on
  };

  // Borrows all arguments, for a group of `size` ranks.
  AutoPolicy(CompressedCalls& calls, InnerGroups& inner, const PythonHooks& hooks, int rank, int size,
             c10::intrusive_ptr<ZcommOptions> options)
      : calls_(calls), inner_(inner), hooks_(hooks), rank_(rank), size_(size), options_(std::move(options)) {}

  // Decides whether compressing `call` pays, for a call that `policy` would compress. Called in the same order on all
  // ranks; the first call of each class, and of some steps, blocks until all ranks reach it. Throws Error if ranks pass
  // different calls, and for a rehearsal on a GPU during graph capture or while calls are coalesced.
  bool gains(const Policy& policy, const Call& call);
  // Tells, for a compressed all-gather, whether Choice::automatic has found one hop faster than two. The bits are the
  // same.
  bool is_one_hop(const Policy& policy, const Call& call) const;

  StepChoice& steps() { return steps_; }
  // Returns the decisions in the order in which they were made.
  std::vector<Decision> decisions() const;

 private:
  // Starts of a call: exact, compressed, and in one hop if that is another way.
  using Ways = std::vector<std::function<WorkPtr()>>;

  // Fills in what is decided about the class; returns false if nothing is.
  bool find(Decision& decision) const;
  void decide(Decision& decision, const Policy& policy, const Call& call);
  bool gains_in_steps(const Decision& by_itself, const Call& call);
  bool any_gains() const;
  // Looks the class up; returns nothing if any rank's table lacks calls of this kind.
  std::optional<Round> look_up(const Decision& decision, const Call& call);
  void rehearse(Decision& decision, const Policy& policy, const Call& call);
  Ways ways(const Policy& policy, const Call& call);
  Ways gathers(const Request& request, ::c10d::Backend& inner);
  std::int64_t time(const std::function<WorkPtr()>& start, const Call& call);
  std::vector<std::int64_t> largest(std::vector<std::int64_t> numbers);
  bool may_take_one_hop(const Call& call) const;
  void check_can_rehearse(const Call& call) const;
  void check_same_call(const Call& call);

  CompressedCalls& calls_;
  InnerGroups& inner_;
  const PythonHooks& hooks_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<ZcommOptions> options_;
  mutable std::mutex mutex_;  // guards the decisions; not held while one is made
  std::vector<Decision> decisions_;
  StepChoice steps_;
};

}  // namespace zcomm::c10d_binding
