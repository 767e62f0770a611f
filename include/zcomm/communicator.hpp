// Communicator: the compressed collectives of one rank in one group.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zcomm/nccl.hpp"
#include "zcomm/operation.hpp"

namespace zcomm {

// Runs collectives of one rank. It owns a transport, a codec and scratch memory.
//
// All ranks must call the same collectives in the same order, with the same shapes, dtypes, formats and factors. Most
// transports compare the calls, and report a mismatch as a TransportError that quotes both.
//
// A communicator runs one collective at a time, and one thread at a time may use it, except for abort().
// After a TransportError it is aborted, and every later call throws.
class Communicator {
 public:
  // Takes ownership of all parts. The codec, the workspace and the transport must be for the same kind of memory.
  // `chunk_bytes` is World::chunk_bytes, in bytes of values of one slot. It must be the same on all ranks.
  // Throws ArgumentError if the topology and the transport differ in size, or if `chunk_bytes` is 0.
  Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
               std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes = kDefaultChunkBytes);

  // Returns the world for which plans of this communicator must be made.
  const World& world() const { return world_; }

  // Returns the nodes of the group.
  const Topology& topology() const { return world_.topology; }

  // Returns this rank, from 0.
  int rank() const { return world_.rank; }

  // Returns the number of ranks.
  int size() const { return topology().size(); }

  // Runs an operation, and returns its cost on this rank. All ranks that take part must make this call.
  //
  // On a CPU it returns when the result is complete. On a GPU it returns when all work is queued on `stream`. It does
  // not wait for the GPU, except for a lossless gather that was not prepared.
  // `timeout` bounds all transfers of the call together.
  // The spans in `arguments` are read before it returns. The memory that they refer to is borrowed until then, on a GPU
  // until `stream` has passed the call.
  // It calls `begin_range`, if that is not null, around each call of the codec and the transport.
  //
  // Throws ArgumentError before any byte moves, and the communicator stays usable:
  //   - the operation was made for another rank, topology or chunk size, or was not planned for these arguments
  //   - an address is null or misaligned, or memory overlaps where it must not
  //   - `stream` captures a CUDA graph, and a format is stochastic or the gather is lossless
  // Throws what the workspace throws if there is no scratch memory. No byte has moved then, and the communicator stays
  // usable; peers wait until this rank makes the call again. In a capture, make the call once on that stream before it.
  // A preparation of lossless gathers, and one that was not prepared on a GPU, send first: these abort.
  //
  // Throws TransportError or TimeoutError if a peer or a transfer fails, and Error if CUDA does. It aborts the
  // communicator then.
  //
  // Example, the mean of a tensor over all ranks, in place:
  //   Communicator communicator(std::move(transport), topology, make_cpu_codec(), make_host_workspace());
  //   const OperationPtr mean = make_all_reduce(
  //       {communicator.world(), tensor.num_elements, tensor.dtype, HopFormats::parse("int8:128/int4:128")});
  //   const float factor = 1.0f / static_cast<float>(communicator.size());
  //   for (int step = 0; step < num_steps; ++step) {  // an operation can run repeatedly
  //     const CallStats stats = communicator.run(*mean, {{}, {&tensor, 1}, factor}, std::chrono::seconds(60));
  //     std::printf("%zu bytes sent\n", stats.wire_bytes());
  //   }
  CallStats run(Operation& operation, const Arguments& arguments, std::chrono::milliseconds timeout,
                StreamView stream = {}, BeginRange begin_range = nullptr);

  // Restarts stochastic rounding. The random bits of a call depend on this seed, the number of calls since, and the
  // rank. The seed is 0 initially.
  void set_seed(std::uint64_t seed) { seed_ = seed; }

  // Computes decoded = decode(encode(values)) in `format`: the values that receivers get.
  // A stochastic format rounds with the seed 0 here, so its receivers get other values of the same distribution.
  // `decoded` has the same number of elements, of any float type or the type of `values`.
  // Moves no byte between ranks. On a GPU the work is queued on `stream`, on a CPU it is done on return.
  // Throws ArgumentError if the lengths differ, or if the codec refuses a view or the format.
  void round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream = {}) const;

  // Makes the pending call and all later ones throw, on this rank and, with `reason`, on its peers.
  // Thread-safe: any thread may call it during another call.
  void abort(const std::string& reason) noexcept { transport_->abort(reason); }

  // As Transport::check_stream(). run() makes this check, too.
  void check_stream(StreamView stream) const { transport_->check_stream(stream); }

  // Blocks the host until the calls in progress on a GPU have completed, at most for their timeouts.
  // abort() ends the wait. The destructor waits, too, but at most 10 s for calls without a timeout.
  void finish() noexcept { transport_->finish(); }

 private:
  std::unique_ptr<Workspace> workspace_;  // first, so that it outlives the transport
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Preparations> preparations_;
  World world_;
  std::uint64_t seed_ = 0;  // of the last call
};

// Connects a communicator over NCCL on the current CUDA device, with a separate pool of scratch memory. All ranks must
// make this call. The topology sets `size`, `node_ids` and, if they are empty, `peers`. Ranks compare the topology,
// `chunk_bytes` and options.agreement. Throws what make_nccl_transport() throws.
std::unique_ptr<Communicator> make_nccl_communicator(const Topology& topology, NcclOptions options,
                                                     std::size_t chunk_bytes);

}  // namespace zcomm
