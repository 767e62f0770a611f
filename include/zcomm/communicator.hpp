// Communicator: the compressed collectives of one rank in one group.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zcomm/operation.hpp"

namespace zcomm {

// Owns a transport, a codec and scratch memory. Checks arguments before any byte moves; runs one collective at a time.
//
// Every rank calls the same collectives in the same order with the same shapes, dtypes, formats and factors; some
// transports compare the calls. After a TransportError the communicator is aborted: further calls throw.
class Communicator {
 public:
  // Throws ArgumentError if the topology and the transport differ in size, or chunk_bytes is 0.
  Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
               std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes = kDefaultChunkBytes);

  const World& world() const { return world_; }
  const Topology& topology() const { return world_.topology; }
  int rank() const { return world_.rank; }
  int size() const { return topology().size(); }

  // Runs an operation. Returns on a CPU when the result is there, on a GPU when all work is queued on `stream`. Throws
  // ArgumentError if the operation is for another rank, topology or chunk size, or was not planned for the arguments.
  // `begin_range` is called for each call of the codec and the transport.
  CallStats run(Operation& operation, const Arguments& arguments, std::chrono::milliseconds timeout,
                StreamView stream = {}, BeginRange begin_range = nullptr);

  // Restarts stochastic rounding: the random bits of a call depend on this seed, the number of calls since, and the
  // rank. The seed is 0 initially.
  void set_seed(std::uint64_t seed) { seed_ = seed; }

  // Computes decoded = decode(encode(values)) in `format`, which is what receivers of `values` get. `decoded` has the
  // same number of elements, of any value type. Does not affect the statistics of the collectives, nor move bytes
  // between ranks. On a GPU the work is queued on `stream`.
  void round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream = {}) const;

  // Makes the pending call and all later ones throw, on this rank and, with `reason`, on its peers. Thread-safe.
  void abort(const std::string& reason) noexcept { transport_->abort(reason); }
  // Waits on the host for calls that are under way, at most for their timeouts. abort() ends it. So does the
  // destructor, but for 10 s where there is no timeout.
  void finish() noexcept { transport_->finish(); }

 private:
  std::unique_ptr<Workspace> workspace_;  // first, so that it outlives the transport
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Preparations> preparations_;
  World world_;
  std::uint64_t seed_ = 0;  // of the last call
};

}  // namespace zcomm
