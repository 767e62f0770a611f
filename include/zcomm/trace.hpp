// Trace of a call: the calls of one rank's codec and transport, recorded without data. Models of time read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zcomm/exchange.hpp"
#include "zcomm/plan.hpp"

namespace zcomm {

// One call of the codec or the transport.
struct TraceStep {
  enum class Kind : std::uint8_t {
    codec,     // a batch of codec jobs
    transfer,  // the start of a transfer, or of a group of them
    wait,      // the wait for a transfer
  };
  Kind kind;
  // codec: launches on a GPU, counted as if all lossy formats were int8 or int4 rounded to nearest.
  // transfer: messages, sends and receives together. wait: the number of the transfer, from 0.
  std::size_t number = 0;
  std::size_t num_bytes = 0;  // codec: bytes read and written
  LinkBytes sent = {};        // transfer: bytes that this rank sends
  int num_ring_steps = 0;     // transfer: steps of the transport's own all_gather, if it makes one
  bool is_beside = false;     // codec: it runs beside other such steps since the last transfer
};
using Trace = std::vector<TraceStep>;

// Returns the steps of one gather, in the order in which a rank's thread makes them. No byte moves, nothing is encoded.
// With `grouped`, the transport starts the transfers of a pipeline step together, as over NCCL. Otherwise it starts
// each at once.
// With `again`, the gather repeats one that filled secondary shards. A gather in one chunk leaves its wires.
// Throws ArgumentError as Communicator::run() does.
Trace trace_of(const GatherPlan& plan, bool grouped, bool again = false);

// Returns the steps of one reduce_scatter. The plan must have no error feedback: ArgumentError otherwise.
Trace trace_of(const ReducePlan& plan, bool grouped);

// Returns the bytes of scratch memory that one reduce_scatter takes. Throws as trace_of() does.
std::size_t scratch_of(const ReducePlan& plan, bool grouped);

// Returns the steps of one all_reduce. The plan must have no error feedback: ArgumentError otherwise.
Trace trace_of(const AllReducePlan& plan, bool grouped);

// Returns the steps of one exchange on this rank.
Trace trace_of(const ExchangePlan& plan, bool grouped);

}  // namespace zcomm
