// Random schedule of calls, captures and failures, and the capacity of the GPU. It is determined by its number.
#pragma once

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ranks.hpp"
#include "values.hpp"

namespace zcomm::test {

inline constexpr std::int64_t kMaxElements = 1500;  // of a shard: up to six chunks

enum class Action { gather, scatter, all_reduce, exchange, broadcast, replay };
enum class Fault { none, stops, aborts, error, hangs };

struct Step {
  Action action;
  std::int64_t elements;  // of a shard
  int lane;               // the stream

  // Tells whether the result is in the tensor of a shard's size.
  bool is_in_part() const { return action == Action::scatter || action == Action::exchange; }
};

class Schedule {
 public:
  explicit Schedule(unsigned number) : seed(number), random_(number) {
    const std::vector<std::vector<int>> shapes{{2}, {3}, {2, 2}, {2, 2}, {1, 1}, {2, 1}};
    ids = node_ids(shapes[draw(shapes.size())]);
    kernel_slots = has_inside() ? pick({2, 4}) : pick({1, 2, 4});
    hardware_queues = pick({0, 1, 2});
    queue_limit = pick({24, 64, 1024});
    delay_us = pick({0, 0, 200});
    launch_polls = pick({0, 2, 5});
    // Captures at most one graph: a graph alive when its communicator fails or closes costs a second.
    has_graph = draw(3) == 0;
    graph_goes_last = draw(8) == 0;
    const std::size_t num_steps = 2 + draw(6);
    for (std::size_t i = 0; i < num_steps; ++i) {
      const auto action = static_cast<Action>(draw(has_graph ? 6 : 5));
      steps.push_back({action, 1 + static_cast<std::int64_t>(draw(kMaxElements)), static_cast<int>(draw(2))});
      // Replays on the first lane's stream, with the captured shape.
      if (action == Action::replay) steps.back() = {action, kMaxElements, 0};
    }
    fault = draw(2) == 0 ? Fault::none : static_cast<Fault>(1 + draw(4));
    bad_rank = static_cast<int>(draw(ids.size()));
    bad_step = draw(steps.size());
    meets_before = draw(2) == 0 || fault == Fault::hangs;
    // Replaces replays after silent faults: a replay has no deadline, and ends only if a peer reports a failure.
    for (std::size_t i = bad_step; (fault == Fault::stops || fault == Fault::hangs) && i < num_steps; ++i) {
      if (steps[i].action == Action::replay) steps[i].action = Action::gather;
    }
    abort_after = std::chrono::microseconds(draw(3000));
  }

  int size() const { return static_cast<int>(ids.size()); }
  // Tells whether some node of several has two ranks: each rank then has a second communicator.
  bool has_inside() const { return num_inside() > 0; }
  // Returns the number of ranks that share a node, one of several.
  int num_inside() const {
    const auto is_shared = [this](int id) { return std::ranges::count(ids, id) > 1; };
    return ids.front() == ids.back() ? 0 : static_cast<int>(std::ranges::count_if(ids, is_shared));
  }
  // Tells whether the graph is destroyed last; not on a rank that stops, which may close before it hears of a failure.
  bool graph_goes_last_on(int rank) const { return graph_goes_last && !(fault == Fault::stops && rank == bad_rank); }
  // Counts communicators left open: nothing tells when the last graph of a communicator that has not failed is gone.
  int num_forgotten() const { return has_graph && graph_goes_last && fault == Fault::none ? size() + num_inside() : 0; }
  Values input(std::size_t step, int rank) const {
    return random_tensors(size(), steps[step].elements * size(),
                          seed * 100 + static_cast<unsigned>(step))[static_cast<std::size_t>(rank)];
  }
  std::string to_string() const {
    std::ostringstream out;
    out << "schedule " << seed << ": " << Topology(ids).to_string() << ", " << kernel_slots << " places for kernels, "
        << hardware_queues << " hardware queues, launch queue of " << queue_limit << ", delays to " << delay_us
        << " us, " << (has_graph ? graph_goes_last ? "a graph that goes last, " : "a graph, " : "") << "steps";
    for (const Step& step : steps) out << ' ' << "gsaebr"[static_cast<int>(step.action)] << step.elements;
    constexpr const char* kFaults[] = {"no fault", "stops", "aborts", "error", "hangs"};
    out << ", " << kFaults[static_cast<int>(fault)] << " on rank " << bad_rank << " at step " << bad_step;
    return out.str();
  }

  unsigned seed;
  std::vector<int> ids;
  int kernel_slots;
  int hardware_queues;
  int queue_limit;
  int delay_us;
  int launch_polls;
  bool has_graph;
  bool graph_goes_last;  // after the communicator
  std::vector<Step> steps;
  Fault fault;
  int bad_rank;
  std::size_t bad_step;
  bool meets_before;  // before the fault all ranks wait for their results, which must be right
  std::chrono::microseconds abort_after;

 private:
  std::size_t draw(std::size_t below) { return random_() % below; }
  int pick(std::initializer_list<int> choices) { return choices.begin()[draw(choices.size())]; }

  std::mt19937 random_;
};

}  // namespace zcomm::test
