// The compressed collectives of one rank in one group.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/collectives.hpp"

namespace zcomm {

class DeviceGathers;

// Values of a shard that are sent as one piece, in bytes. Large enough for a message to fill its link, small enough for
// the hops and the codec to overlap.
inline constexpr std::size_t kDefaultChunkBytes = std::size_t{1} << 20;

// The same for GPUs, among `size` ranks. There a chunk costs a launch of NCCL's, about as long as 20 MiB take over
// NVLink: docs/performance.md has the model that this comes from.
constexpr std::size_t default_gpu_chunk_bytes(int size) {
  return kMaxChunkBytesOfAllShards / static_cast<std::size_t>(size);
}

// Owns a transport, a codec and scratch; checks arguments before any byte moves; runs collectives one at a time.
//
// Every rank calls the same collectives in the same order with the same shapes, dtypes, formats and factors; a
// transport that can, compares. After a TransportError the communicator is aborted: further calls throw.
class Communicator {
 public:
  // Throws ArgumentError if the topology's size is not the transport's, or chunk_bytes is 0.
  Communicator(std::unique_ptr<Transport> transport, Topology topology, std::unique_ptr<Codec> codec,
               std::unique_ptr<Workspace> workspace, std::size_t chunk_bytes = kDefaultChunkBytes);

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const Topology& topology() const { return topology_; }

  // What a call of this rank will do, for callers that make it again and again or want to know what it costs. Throw
  // ArgumentError.
  GatherPlan plan_all_gather(SlotShape slots, GatherSegments segments) const {
    return {topology_, rank(), chunk_bytes_, std::move(slots), segments};
  }
  DifferencePlan plan_differences(const SlotShape& slots) const { return {topology_, rank(), chunk_bytes_, slots}; }
  ReducePlan plan_reduce_scatter(SlotShape slots, ReduceSegments segments,
                                 std::optional<BlockFormat> feedback = {}) const {
    return {topology_, rank(), chunk_bytes_, std::move(slots), segments, feedback};
  }
  AllReducePlan plan_all_reduce(std::int64_t num_elements, DType dtype, HopFormats formats,
                                std::optional<BlockFormat> feedback = {}) const {
    return {topology_, rank(), chunk_bytes_, num_elements, dtype, formats, feedback};
  }

  // See collectives.hpp. On a CPU they return when the result is there, on a GPU when all is queued on `stream`. Throw
  // ArgumentError if the plan is for another rank, topology, shape, chunk size or format of the residual.
  CallStats all_gather(const GatherPlan& plan, ConstTensorView shard, std::span<const TensorView> slots,
                       std::chrono::milliseconds timeout, StreamView stream = {}, GatherExtras extras = {});
  CallStats gather_secondary(const GatherPlan& plan, const std::byte* secondary, std::span<const TensorView> slots,
                             std::chrono::milliseconds timeout, StreamView stream = {});
  // By differences. On a GPU what arrives is checked there: all values of a slot that is not right become NaN, and
  // soon, as after a transfer that failed, every call throws TransportError that names the slot and the generations.
  // There they throw ArgumentError while a graph is captured, and one call uses `kept` at a time, on any stream.
  CallStats all_gather(const DifferencePlan& plan, ConstTensorView shard, std::span<const TensorView> slots,
                       KeptShards& kept, std::chrono::milliseconds timeout, StreamView stream = {});
  CallStats gather_secondary(const DifferencePlan& plan, const KeptShards& kept, std::span<const TensorView> slots,
                             std::chrono::milliseconds timeout, StreamView stream = {});
  // On a GPU the host has to wait for the sizes of differences. This does so once for all of `shards`: it encodes them,
  // and exchanges the sizes. Each one's next all_gather then sends what was encoded, does not read the shard, and waits
  // for nothing; without this it waits for itself. Until then what is encoded is kept in the workspace, and `stream`
  // must exist. A shard that is prepared again before it was gathered is sent whole. At least one; all ranks have the
  // same in the same order. Throws ArgumentError if the codec is not that of a GPU.
  CallStats prepare_differences(std::span<const ShardDifference> shards, std::chrono::milliseconds timeout,
                                StreamView stream = {});
  CallStats reduce_scatter(const ReducePlan& plan, std::span<const ConstTensorView> slots, TensorView output,
                           float factor, std::chrono::milliseconds timeout, StreamView stream = {},
                           const Feedback* feedback = nullptr);
  CallStats all_reduce(const AllReducePlan& plan, TensorView tensor, float factor, std::chrono::milliseconds timeout,
                       StreamView stream = {}, const Feedback* feedback = nullptr);

  // The same, with a plan of their own. With a format in place of segments, all of a slot is sent in it.
  CallStats all_gather(ConstTensorView shard, std::span<const TensorView> slots, GatherSegments segments,
                       std::chrono::milliseconds timeout, StreamView stream = {}, GatherExtras extras = {});
  CallStats all_gather(ConstTensorView shard, std::span<const TensorView> slots, BlockFormat format,
                       std::chrono::milliseconds timeout, StreamView stream = {}, GatherExtras extras = {});
  std::size_t secondary_bytes(std::span<const TensorView> slots, GatherSegments segments) const {
    return zcomm::secondary_bytes(topology_, rank(), chunk_bytes_, slots, segments);
  }
  CallStats gather_secondary(const std::byte* secondary, std::span<const TensorView> slots, GatherSegments segments,
                             std::chrono::milliseconds timeout, StreamView stream = {});
  CallStats reduce_scatter(std::span<const ConstTensorView> slots, TensorView output, ReduceSegments segments,
                           float factor, std::chrono::milliseconds timeout, StreamView stream = {},
                           const Feedback* feedback = nullptr);
  CallStats reduce_scatter(std::span<const ConstTensorView> slots, TensorView output, HopFormats formats, float factor,
                           std::chrono::milliseconds timeout, StreamView stream = {});
  CallStats all_reduce(TensorView tensor, HopFormats formats, float factor, std::chrono::milliseconds timeout,
                       StreamView stream = {}, const Feedback* feedback = nullptr);
  std::size_t feedback_bytes(std::span<const ConstTensorView> slots, ReduceSegments segments,
                             BlockFormat format) const {
    return zcomm::feedback_bytes(topology_, rank(), chunk_bytes_, slots, segments, format);
  }

  // Stochastic rounding begins anew from here: each call draws bits of its own, which depend on this seed, the number
  // of calls since, and the rank. 0 until it is set.
  void set_seed(std::uint64_t seed) {
    seed_ = seed;
    num_calls_ = 0;
  }

  // What the receivers of `values` have of them: decoded = decode(encode(values)) in `format`, with the codec of the
  // collectives. `decoded` has as many elements, of any value type; the numbers of the collectives are unchanged by it.
  // Moves no byte between ranks. On a GPU it is queued on `stream`.
  void round_trip(ConstTensorView values, BlockFormat format, TensorView decoded, StreamView stream = {}) const;

  // Makes the pending call and all later ones throw, on this rank and, with `reason`, on its peers. Any thread.
  void abort(const std::string& reason) noexcept { transport_->abort(reason); }

 private:
  bool is_on_device() const { return codec_->device_differences() != nullptr; }
  void check_difference(const DifferencePlan& plan, const KeptShards& kept, StreamView stream) const;
  DeviceGathers& device_gathers();
  template <class Plan>
  void check_plan(const Plan& plan, const SlotShape& slots) const;
  template <class Body>
  CallStats run(const std::string& call, std::span<const int> peers, std::chrono::milliseconds timeout,
                StreamView stream, Body&& body);

  std::unique_ptr<Workspace> workspace_;  // first, so that it outlives the transport
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<DeviceGathers> device_gathers_;  // since the first one
  Topology topology_;
  std::vector<int> peers_;       // that this rank exchanges bytes with
  std::vector<int> node_peers_;  // of them, those of its node
  std::vector<int> others_;      // all ranks but this one: the peers of direct collectives
  std::size_t chunk_bytes_;
  std::uint64_t seed_ = 0;
  std::uint64_t num_calls_ = 0;  // since the seed was set
};

}  // namespace zcomm
