// Trace of a call: what one rank's codec and transport are called for, recorded without data. Models of time read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zcomm/exchange.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

struct TraceStep {
  enum class Kind : std::uint8_t { codec, transfer, wait };
  Kind kind;
  std::size_t number = 0;     // launches of a GPU's codec; messages of a transfer, both ways; a wait's transfer, from 0
  std::size_t num_bytes = 0;  // that a codec call reads and writes
  LinkBytes sent = {};        // by a transfer
  int num_ring_steps = 0;     // of a transport's own all_gather
};
using Trace = std::vector<TraceStep>;

// Returns the steps of one call, in the order in which a rank's thread makes them. `grouped`: the transport starts the
// transfers of a pipeline's step together, as NCCL's does; else each at once. `again`: the gather repeats one whose
// wires are kept in secondary shards. Throws ArgumentError as the call.
Trace trace_of(const GatherPlan& plan, bool grouped, bool again = false);
Trace trace_of(const ReducePlan& plan, bool grouped);
Trace trace_of(const AllReducePlan& plan, bool grouped);
Trace trace_of(const ExchangePlan& plan, bool grouped);

}  // namespace zcomm
